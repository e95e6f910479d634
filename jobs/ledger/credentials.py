"""API keys: `grpo_<id>_<32 random bytes>`, of which the database keeps the id and a SHA-256.

The secret has 256 bits of entropy, so a slow hash would add nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from grpo_engine.contract.error import InvalidRequest, NotFound
from jobs.ledger.book import Book
from jobs.ledger.records import ApiKeyRecord
from jobs.scopes import SCOPES
from jobs.tables import api_keys

_TOUCH_S = 60.0


class CredentialBook(Book):
    """API keys."""

    def create_api_key(
        self, *, name: str, scopes: Collection[str], project: str = "default", expires_at: float | None = None
    ) -> tuple[ApiKeyRecord, str]:
        """A new key and its secret, which is shown this once. Raises InvalidRequest for an unknown scope."""
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown or not scopes:
            raise InvalidRequest(f"scopes must be some of {', '.join(SCOPES)}; got {unknown or 'none'}", param="scopes")
        key_id = secrets.token_hex(8)
        secret = f"grpo_{key_id}_{secrets.token_urlsafe(32)}"
        with self.database.write() as connection:
            connection.execute(
                sa.insert(api_keys).values(
                    id=key_id, sha256=_digest(secret), name=name, project=project, scopes=",".join(sorted(set(scopes))),
                    created_at=self.clock(), expires_at=expires_at,
                )
            )  # fmt: skip
        return self.get_api_key(key_id), secret

    def get_api_key(self, key_id: str) -> ApiKeyRecord:
        """The key without its secret. Raises NotFound."""
        with self.database.read() as connection:
            row = connection.execute(sa.select(api_keys).where(api_keys.c.id == key_id)).one_or_none()
        if row is None:
            raise NotFound(f"no API key has the id {key_id[:80]!r}")
        return _key_record(row)

    def list_api_keys(self) -> list[ApiKeyRecord]:
        """All keys, oldest first."""
        with self.database.read() as connection:
            return [_key_record(row) for row in connection.execute(sa.select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id))]

    def revoke_api_key(self, key_id: str) -> ApiKeyRecord:
        """The key opens nothing any more; harmless to repeat. Raises NotFound."""
        self.get_api_key(key_id)
        with self.database.write() as connection:
            fresh = sa.and_(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
            connection.execute(sa.update(api_keys).where(fresh).values(revoked_at=self.clock()))
        return self.get_api_key(key_id)

    def check_api_key(self, secret: str) -> ApiKeyRecord | None:
        """The key this secret belongs to, if it is known, not revoked and not expired. Notes its use, at most once a minute."""
        parts = secret.split("_", 2)
        if len(parts) != 3 or parts[0] != "grpo" or not parts[1].isalnum() or len(secret) > 256 or not secret.isascii():
            return None
        with self.database.read() as connection:
            row = connection.execute(sa.select(api_keys).where(api_keys.c.id == parts[1])).one_or_none()
        now = self.clock()
        if row is None or not hmac.compare_digest(row.sha256, _digest(secret)):
            return None
        if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
            return None
        if row.last_used_at is None or abs(now - row.last_used_at) > _TOUCH_S:
            with self.database.write() as connection:
                connection.execute(sa.update(api_keys).where(api_keys.c.id == row.id).values(last_used_at=now))
        return _key_record(row)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _key_record(row: sa.Row[Any]) -> ApiKeyRecord:
    return ApiKeyRecord(
        row.id, row.name, row.project, tuple(row.scopes.split(",")), row.created_at, row.expires_at, row.last_used_at, row.revoked_at
    )
