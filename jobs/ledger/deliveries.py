"""Webhook deliveries: made from the history exactly once, tried until taken, kept as a log."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from grpo_engine.contract.error import InvalidRequest, NotFound
from jobs.ledger.book import Book
from jobs.ledger.records import EventRecord, Page
from jobs.ledger.rows import event_record
from jobs.ledger.spelling import new_id
from jobs.ledger.webhooks import CURSOR_FACT, EndpointRecord
from jobs.tables import facts, job_events, webhook_deliveries

DeliveryStatus = Literal["pending", "delivered", "failed"]

BATCH = 500
LOOK_BACK = 1000
"""Event numbers read again each time: on PostgreSQL a lower number may be committed after a higher one was seen."""


@dataclass(frozen=True)
class DeliveryRecord:
    """One event on its way to one subscriber."""

    id: str
    endpoint_id: str
    event_id: str
    event_type: str
    body: str
    created_at: float
    status: DeliveryStatus
    tries: int
    next_try_at: float
    last_try_at: float | None
    status_code: int | None
    error: str | None


@dataclass(frozen=True)
class NewDelivery:
    """A delivery to be made."""

    endpoint_id: str
    event_number: int | None
    event_id: str
    event_type: str
    body: str


class DeliveryBook(Book):
    """Deliveries."""

    def plan_deliveries(
        self, endpoints: Sequence[EndpointRecord], kinds: Collection[str], plan: Callable[[EventRecord], Sequence[NewDelivery]]
    ) -> int:
        """Turn what the history has since the last call into deliveries; how many. Each event once a subscriber, however often called."""
        if not endpoints:
            return 0
        table, since = job_events.c, min(endpoint.created_at for endpoint in endpoints)
        with self.database.read() as connection:
            cursor = int(connection.execute(sa.select(facts.c.value).where(facts.c.name == CURSOR_FACT)).scalar_one_or_none() or 0)
            last = connection.execute(sa.select(sa.func.max(table.id))).scalar_one() or 0
            query = sa.select(job_events).where(table.id > cursor - LOOK_BACK, table.type.in_(sorted(kinds)), table.time >= since)
            rows = connection.execute(query.order_by(table.id).limit(BATCH + LOOK_BACK)).all()
            planned = [delivery for row in rows for delivery in plan(event_record(row))]
            numbers = {delivery.event_number for delivery in planned}
            same = webhook_deliveries.c.event_number.in_(numbers)
            columns = (webhook_deliveries.c.endpoint_id, webhook_deliveries.c.event_number)
            known = {tuple(row) for row in connection.execute(sa.select(*columns).where(same))} if numbers else set()
        new = [delivery for delivery in planned if (delivery.endpoint_id, delivery.event_number) not in known]
        reached = rows[-1].id if len(rows) == BATCH + LOOK_BACK else last
        if not new and reached == cursor:
            return 0
        with self.database.write() as connection:
            for delivery in new:
                self._add(connection, delivery)
            connection.execute(sa.update(facts).where(facts.c.name == CURSOR_FACT).values(value=str(reached)))
        return len(new)

    def add_delivery(self, delivery: NewDelivery, *, claimed_until: float = 0.0) -> DeliveryRecord:
        """Keep a delivery outside the plan: a test."""
        with self.database.write() as connection:
            return self._delivery(connection, self._add(connection, delivery, claimed_until=claimed_until))

    def claim_deliveries(self, limit: int, hold_s: float) -> list[DeliveryRecord]:
        """Due deliveries, for this caller alone for `hold_s` seconds."""
        now, table = self.clock(), webhook_deliveries.c
        due = sa.and_(table.status == "pending", table.next_try_at <= now, table.claimed_until <= now)
        with self.database.read() as connection:
            ids = connection.execute(sa.select(table.id).where(due).order_by(table.next_try_at).limit(limit)).scalars().all()
        if not ids:
            return []
        claimed: list[DeliveryRecord] = []
        with self.database.write() as connection:
            for identity in ids:
                mine = sa.update(webhook_deliveries).where(table.id == identity, due).values(claimed_until=now + hold_s)
                if connection.execute(mine).rowcount == 1:
                    claimed.append(self._delivery(connection, identity))
        return claimed

    def record_try(
        self, delivery_id: str, *, status: DeliveryStatus, status_code: int | None, error: str | None, next_try_at: float
    ) -> DeliveryRecord:
        """How a try ended. Raises NotFound."""
        table = webhook_deliveries.c
        values: Mapping[str, Any] = {
            "status": status, "status_code": status_code, "error": error, "next_try_at": next_try_at, "claimed_until": 0.0,
            "last_try_at": self.clock(), "tries": table.tries + 1,
        }  # fmt: skip
        with self.database.write() as connection:
            connection.execute(sa.update(webhook_deliveries).where(table.id == delivery_id).values(**values))
            return self._delivery(connection, delivery_id)

    def redeliver(self, endpoint_id: str, delivery_id: str) -> DeliveryRecord:
        """Try again at once, with a fresh count of tries. The event keeps its id. Raises NotFound."""
        table = webhook_deliveries.c
        with self.database.write() as connection:
            record = self._delivery(connection, delivery_id)
            if record.endpoint_id != endpoint_id:
                raise NotFound(f"endpoint {endpoint_id} has no delivery {delivery_id}; list its deliveries")
            values: Mapping[str, Any] = {"status": "pending", "tries": 0, "next_try_at": self.clock(), "error": None, "status_code": None}
            connection.execute(sa.update(webhook_deliveries).where(table.id == delivery_id).values(**values))
            return self._delivery(connection, delivery_id)

    def deliveries(
        self, endpoint_id: str, *, after: str | None = None, limit: int = 20, status: DeliveryStatus | None = None
    ) -> Page[DeliveryRecord]:
        """An endpoint's deliveries, newest first. Raises InvalidRequest for an unknown cursor."""
        table = webhook_deliveries.c
        query = sa.select(webhook_deliveries).where(table.endpoint_id == endpoint_id)
        if status is not None:
            query = query.where(table.status == status)
        with self.database.read() as connection:
            if after is not None:
                edge = connection.execute(sa.select(table.created_at, table.id).where(table.id == after)).one_or_none()
                if edge is None:
                    raise InvalidRequest(f"after names no delivery: {after[:80]!r}; use an id from the list", param="after")
                mark = sa.tuple_(sa.literal(edge.created_at), sa.literal(edge.id))
                query = query.where(sa.tuple_(table.created_at, table.id) < mark)
            rows = connection.execute(query.order_by(table.created_at.desc(), table.id.desc()).limit(limit + 1)).all()
        return Page([_record(row) for row in rows[:limit]], len(rows) > limit)

    def forget_deliveries(self, before: float) -> int:
        """Drop finished deliveries made before this time; how many."""
        table = webhook_deliveries.c
        with self.database.write() as connection:
            return connection.execute(sa.delete(webhook_deliveries).where(table.status != "pending", table.created_at < before)).rowcount

    def _add(self, connection: sa.Connection, delivery: NewDelivery, *, claimed_until: float = 0.0) -> str:
        identity, now = new_id("whd"), self.clock()
        connection.execute(
            sa.insert(webhook_deliveries).values(
                id=identity, endpoint_id=delivery.endpoint_id, event_number=delivery.event_number, event_id=delivery.event_id,
                event_type=delivery.event_type, body=delivery.body, created_at=now, status="pending", tries=0, next_try_at=now,
                claimed_until=claimed_until,
            )
        )  # fmt: skip
        return identity

    def _delivery(self, connection: sa.Connection, delivery_id: str) -> DeliveryRecord:
        row = connection.execute(sa.select(webhook_deliveries).where(webhook_deliveries.c.id == delivery_id)).one_or_none()
        if row is None:
            raise NotFound(f"no delivery has the id {delivery_id[:80]!r}; list the endpoint's deliveries")
        return _record(row)


def _record(row: sa.Row[Any]) -> DeliveryRecord:
    return DeliveryRecord(
        id=row.id, endpoint_id=row.endpoint_id, event_id=row.event_id, event_type=row.event_type, body=row.body,
        created_at=row.created_at, status=row.status, tries=row.tries, next_try_at=row.next_try_at, last_try_at=row.last_try_at,
        status_code=row.status_code, error=row.error,
    )  # fmt: skip
