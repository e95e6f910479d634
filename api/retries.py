"""Telling a re-sent POST from a new one when the client sends no Idempotency-Key.

The openai SDK re-sends a POST after a lost answer or a 5xx with `x-stainless-retry-count: 1` and no key. Each create without a key
leaves a mark (caller, body); the mark goes when the answer was handed to a client that was still there. A re-sent request with
the same body, from the same caller, that finds a mark at most 60 s old gets that job instead of a second one.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import sqlalchemy as sa
from fastapi import Request

from jobs.database import Database
from jobs.ledger.records import IdempotencyKey
from jobs.ledger.spelling import body_sha256
from jobs.tables import idempotency_keys

WINDOW_S = 60.0


def is_resent(request: Request) -> bool:
    """Whether the SDK says that it sends this request again."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isascii() and count.isdecimal() and len(count) <= 9 and int(count) > 0


def new_mark(caller: str, body: Any) -> IdempotencyKey:
    """The mark of a create whose answer is not delivered yet."""
    return IdempotencyKey(scope=_scope(caller), key=uuid.uuid4().hex, body_sha256=body_sha256(body))


def undelivered(database: Database, caller: str, body: Any) -> IdempotencyKey | None:
    """The newest mark of the same caller and body within the window."""
    table = idempotency_keys.c
    query = sa.select(table.key, table.body_sha256).where(
        table.scope == _scope(caller), table.body_sha256 == body_sha256(body), table.created_at > time.time() - WINDOW_S
    )
    with database.read() as connection:
        row = connection.execute(query.order_by(table.created_at.desc()).limit(1)).one_or_none()
    return None if row is None else IdempotencyKey(_scope(caller), row.key, row.body_sha256)


def note_delivered(database: Database, mark: IdempotencyKey) -> None:
    """The client has the answer; a later request with the same body is a new job. Old marks go too."""
    table = idempotency_keys.c
    stale = sa.and_(table.scope == mark.scope, sa.or_(table.key == mark.key, table.created_at < time.time() - WINDOW_S))
    with database.write() as connection:
        connection.execute(sa.delete(idempotency_keys).where(stale))


def _scope(caller: str) -> str:
    return f"unanswered:{caller}"[:128]
