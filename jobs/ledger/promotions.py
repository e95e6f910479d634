"""Checkpoints a person holds on to: pinned against retention, and promoted behind gates."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from grpo_engine.contract.error import Conflict, NotFound
from jobs.ledger.book import Book
from jobs.ledger.records import CheckpointRecord
from jobs.ledger.rows import checkpoint_record
from jobs.ledger.spelling import canonical_json
from jobs.tables import checkpoints, promotions


@dataclass(frozen=True)
class PromotionRecord:
    """A checkpoint passed its gates."""

    checkpoint_id: str
    promoted_at: float
    actor: str
    gates: dict[str, float]
    note: str | None


class PromotionBook(Book):
    """Pins and promotions. Both live in the database alone: a rebuild from the job directories knows neither."""

    def pin(self, checkpoint_id: str, *, is_pinned: bool, actor: str = "operator") -> CheckpointRecord:
        """Keep a published checkpoint whatever retention says, or no longer; harmless to repeat.

        Raises NotFound, or Conflict when a promoted one would be let go.
        """
        with self.database.write() as connection:
            record = self._stored(connection, checkpoint_id)
            if not is_pinned and self._promotion(connection, checkpoint_id) is not None:
                raise Conflict(f"checkpoint {checkpoint_id} is promoted, which keeps it; withdraw the promotion first")
            if record.pinned != is_pinned:
                connection.execute(sa.update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(pinned=is_pinned))
                word = "pinned" if is_pinned else "unpinned"
                data = {"checkpoint": checkpoint_id, "name": record.name, "actor": actor}
                message = f"Checkpoint {record.name} was {word}."
                self._note(connection, record.job_id, f"checkpoint.{word}", message, step=record.step, data=data)
            return self._stored(connection, checkpoint_id)

    def promote(self, checkpoint_id: str, *, gates: Mapping[str, float], note: str | None, actor: str = "operator") -> CheckpointRecord:
        """Record that the checkpoint passed these gates, and pin it. A later promotion replaces an earlier one. Raises NotFound."""
        with self.database.write() as connection:
            record = self._stored(connection, checkpoint_id)
            values = {"promoted_at": self.clock(), "actor": actor, "gates": canonical_json(dict(gates)), "note": note}
            mine = promotions.c.checkpoint_id == checkpoint_id
            if connection.execute(sa.update(promotions).where(mine).values(**values)).rowcount == 0:
                connection.execute(sa.insert(promotions).values(checkpoint_id=checkpoint_id, **values))
            connection.execute(sa.update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(pinned=True))
            data = {"checkpoint": checkpoint_id, "name": record.name, "actor": actor, "gates": dict(gates)}
            message = f"Checkpoint {record.name} passed its gates and was promoted."
            self._note(connection, record.job_id, "checkpoint.promoted", message, step=record.step, data=data)
            return self._stored(connection, checkpoint_id)

    def withdraw_promotion(self, checkpoint_id: str, *, actor: str = "operator") -> CheckpointRecord:
        """The checkpoint is no longer promoted; it stays pinned. Harmless to repeat. Raises NotFound."""
        with self.database.write() as connection:
            record = self._stored(connection, checkpoint_id)
            if connection.execute(sa.delete(promotions).where(promotions.c.checkpoint_id == checkpoint_id)).rowcount:
                data = {"checkpoint": checkpoint_id, "name": record.name, "actor": actor}
                message = f"The promotion of checkpoint {record.name} was withdrawn."
                self._note(connection, record.job_id, "checkpoint.demoted", message, step=record.step, data=data)
            return record

    def promotions_of(self, checkpoint_ids: Collection[str]) -> dict[str, PromotionRecord]:
        """Promotions by checkpoint id; checkpoints without one are absent."""
        if not checkpoint_ids:
            return {}
        query = sa.select(promotions).where(promotions.c.checkpoint_id.in_(sorted(checkpoint_ids)))
        with self.database.read() as connection:
            return {row.checkpoint_id: _record(row) for row in connection.execute(query)}

    def _stored(self, connection: sa.Connection, checkpoint_id: str) -> CheckpointRecord:
        """The checkpoint, its job's row locked first."""
        query = sa.select(checkpoints).where(checkpoints.c.id == checkpoint_id, checkpoints.c.deleted_at.is_(None))
        row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFound(f"no checkpoint has the id {checkpoint_id[:80]!r}; check it against the job's list")
        self._job(connection, row.job_id, lock=True)
        return checkpoint_record(row)

    def _promotion(self, connection: sa.Connection, checkpoint_id: str) -> PromotionRecord | None:
        row = connection.execute(sa.select(promotions).where(promotions.c.checkpoint_id == checkpoint_id)).one_or_none()
        return None if row is None else _record(row)


def _record(row: sa.Row[tuple[object, ...]]) -> PromotionRecord:
    return PromotionRecord(row.checkpoint_id, row.promoted_at, row.actor, json.loads(row.gates), row.note)
