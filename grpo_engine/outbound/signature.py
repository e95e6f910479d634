"""Standard Webhooks signatures: HMAC-SHA256 over `id.timestamp.body`, version v1 (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

PREFIX = "whsec_"
SECRET_BYTES = 32


def new_secret() -> str:
    """`whsec_` and 32 random bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def hint(secret: str) -> str:
    """Enough of a secret to recognise it."""
    return f"{PREFIX}...{secret[-4:]}"


def headers(identity: str, timestamp: int, body: str, keys: Sequence[str]) -> dict[str, str]:
    """The three headers; one signature a secret, so that a receiver may hold the old or the new one during a rotation."""
    return {
        "webhook-id": identity,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(_sign(identity, timestamp, body, key) for key in keys),
    }


def _sign(identity: str, timestamp: int, body: str, secret: str) -> str:
    key = base64.b64decode(secret.removeprefix(PREFIX))
    digest = hmac.new(key, f"{identity}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
