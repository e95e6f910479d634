"""How the ledger spells ids, JSON and the hash of a request."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any


def canonical_json(value: Any) -> str:
    """One spelling for equal JSON values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def body_sha256(body: Any) -> str:
    """Hash of a decoded JSON body, blind to key order and white space."""
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def new_id(prefix: str) -> str:
    """A fresh id: `ftjob-`, `file-` and 24 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(12)}"


def checkpoint_id(job_id: str, epoch: int, name: str) -> str:
    """`ftckpt-` and 24 digits that follow from where the checkpoint lies, so that a rebuilt database knows it by the same id."""
    return f"ftckpt-{hashlib.sha256(f'{job_id}/{epoch}/{name}'.encode()).hexdigest()[:24]}"
