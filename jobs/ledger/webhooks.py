"""Webhook endpoints: who wants to be told what. Their deliveries are in `deliveries.py`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from grpo_engine.contract.error import InvalidRequest, NotFound
from jobs.ledger.book import Book
from jobs.ledger.records import Order, Page
from jobs.ledger.spelling import canonical_json, new_id
from jobs.tables import facts, job_events, webhook_deliveries, webhook_endpoints

CURSOR_FACT = "webhook_cursor"
"""Number of the last event in the history that was turned into deliveries."""
KEEP_OLD_S = 24 * 3600.0
MAX_ENDPOINTS = 50


@dataclass(frozen=True)
class EndpointRecord:
    """A subscriber."""

    id: str
    name: str
    url: str
    event_types: tuple[str, ...]
    secret: str
    old_secret: str | None
    old_secret_until: float | None
    created_at: float
    updated_at: float

    def keys(self, now: float) -> list[str]:
        """The secrets that sign at this moment, the present one first."""
        is_old_valid = self.old_secret is not None and self.old_secret_until is not None and now < self.old_secret_until
        return [self.secret, self.old_secret] if is_old_valid and self.old_secret is not None else [self.secret]


class WebhookBook(Book):
    """Endpoints."""

    def add_endpoint(self, *, name: str, url: str, event_types: Collection[str], secret: str, project: str = "default") -> EndpointRecord:
        """A new subscriber; it hears what happens from now on. Raises InvalidRequest when there are too many."""
        identity, now = new_id("whe"), self.clock()
        with self.database.write() as connection:
            live = webhook_endpoints.c.deleted_at.is_(None)
            number = connection.execute(sa.select(sa.func.count()).select_from(webhook_endpoints).where(live)).scalar_one()
            if number >= MAX_ENDPOINTS:
                raise InvalidRequest(f"there are {number} webhook endpoints already; delete one first")
            if number == 0:
                self._start_cursor(connection)
            connection.execute(
                sa.insert(webhook_endpoints).values(
                    id=identity, project=project, name=name, url=url, event_types=canonical_json(sorted(set(event_types))),
                    secret=secret, created_at=now, updated_at=now,
                )
            )  # fmt: skip
            return self._endpoint(connection, identity)

    def get_endpoint(self, endpoint_id: str) -> EndpointRecord:
        """The subscriber. Raises NotFound."""
        with self.database.read() as connection:
            return self._endpoint(connection, endpoint_id)

    def endpoints(self) -> list[EndpointRecord]:
        """All subscribers, oldest first."""
        table = webhook_endpoints.c
        query = sa.select(webhook_endpoints).where(table.deleted_at.is_(None)).order_by(table.created_at, table.id)
        with self.database.read() as connection:
            return [_endpoint_record(row) for row in connection.execute(query)]

    def list_endpoints(self, *, after: str | None = None, limit: int = 20, order: Order = "desc") -> Page[EndpointRecord]:
        """A page in order of creation. Raises InvalidRequest for an unknown cursor."""
        found = self.endpoints()
        if order == "desc":
            found.reverse()
        if after is not None:
            ids = [record.id for record in found]
            if after not in ids:
                raise InvalidRequest(f"after names no webhook endpoint: {after[:80]!r}; use an id from the list", param="after")
            found = found[ids.index(after) + 1 :]
        return Page(found[:limit], len(found) > limit)

    def change_endpoint(
        self, endpoint_id: str, *, name: str | None = None, url: str | None = None, event_types: Collection[str] | None = None
    ) -> EndpointRecord:
        """Replace what is given. Raises NotFound."""
        values: dict[str, Any] = {}
        if name is not None:
            values["name"] = name
        if url is not None:
            values["url"] = url
        if event_types is not None:
            values["event_types"] = canonical_json(sorted(set(event_types)))
        return self._change(endpoint_id, values)

    def rotate_endpoint_secret(self, endpoint_id: str, secret: str, *, keep_old: bool) -> EndpointRecord:
        """Sign with a new secret from now on; with `keep_old` by the old one as well for 24 hours. Raises NotFound."""
        until = self.clock() + KEEP_OLD_S if keep_old else None
        old = self.get_endpoint(endpoint_id).secret if keep_old else None
        return self._change(endpoint_id, {"secret": secret, "old_secret": old, "old_secret_until": until})

    def delete_endpoint(self, endpoint_id: str) -> None:
        """The subscriber hears nothing more; what is pending is dropped. Raises NotFound."""
        with self.database.write() as connection:
            self._endpoint(connection, endpoint_id)
            mine = webhook_endpoints.c.id == endpoint_id
            connection.execute(sa.update(webhook_endpoints).where(mine).values(deleted_at=self.clock()))
            pending = sa.and_(webhook_deliveries.c.endpoint_id == endpoint_id, webhook_deliveries.c.status == "pending")
            values = {"status": "failed", "error": "the endpoint was deleted"}
            connection.execute(sa.update(webhook_deliveries).where(pending).values(**values))

    def _change(self, endpoint_id: str, values: dict[str, Any]) -> EndpointRecord:
        with self.database.write() as connection:
            before = connection.execute(sa.select(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id)).one_or_none()
            self._endpoint(connection, endpoint_id)
            assert before is not None
            if any(getattr(before, key) != value for key, value in values.items()):
                changed = {**values, "updated_at": self.clock()}
                connection.execute(sa.update(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id).values(**changed))
            return self._endpoint(connection, endpoint_id)

    def _endpoint(self, connection: sa.Connection, endpoint_id: str) -> EndpointRecord:
        query = sa.select(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id, webhook_endpoints.c.deleted_at.is_(None))
        row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFound(f"no webhook endpoint has the id {endpoint_id[:80]!r}; check it against the list")
        return _endpoint_record(row)

    def _start_cursor(self, connection: sa.Connection) -> None:
        """Nobody was told anything before: begin after the history so far."""
        last = connection.execute(sa.select(sa.func.max(job_events.c.id))).scalar_one() or 0
        connection.execute(sa.delete(facts).where(facts.c.name == CURSOR_FACT))
        connection.execute(sa.insert(facts).values(name=CURSOR_FACT, value=str(last)))


def _endpoint_record(row: sa.Row[Any]) -> EndpointRecord:
    return EndpointRecord(
        id=row.id, name=row.name, url=row.url, event_types=tuple(json.loads(row.event_types)), secret=row.secret,
        old_secret=row.old_secret, old_secret_until=row.old_secret_until, created_at=row.created_at, updated_at=row.updated_at,
    )  # fmt: skip
