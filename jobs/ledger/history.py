"""Reading what happened: events, telemetry, checkpoints."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json
from sqlalchemy.dialects import postgresql

from grpo_engine.contract.error import InvalidRequest, NotFound
from jobs.ledger.book import Book
from jobs.ledger.records import CheckpointRecord, EventRecord, Integrity, Order, Page, StepRecord
from jobs.ledger.rows import checkpoint_record, event_record
from jobs.tables import checkpoints, job_events, steps

MAX_MISSING = 1000
MAX_PICKED = 8

_STEP_COLUMNS = (steps.c.step, steps.c.epoch, steps.c.seq, steps.c.time, steps.c.beta, steps.c.superseded)


class HistoryBook(Book):
    """Events, telemetry and checkpoints."""

    def events(
        self, job_id: str, *, after: int | None = None, limit: int = 100, order: Order = "asc", types: Collection[str] | None = None
    ) -> Page[EventRecord]:
        """A page of the job's history by event number; `after` excludes itself. Raises NotFound for the job."""
        query = sa.select(job_events).where(job_events.c.job_id == job_id)
        if after is not None:
            query = query.where(job_events.c.id > after if order == "asc" else job_events.c.id < after)
        if types is not None:
            query = query.where(job_events.c.type.in_(sorted(types)))
        way = sa.asc if order == "asc" else sa.desc
        with self.database.read() as connection:
            self._job(connection, job_id)
            rows = connection.execute(query.order_by(way(job_events.c.id)).limit(limit + 1)).all()
        return Page([event_record(row) for row in rows[:limit]], len(rows) > limit)

    def event_number(self, event_id: str) -> int:
        """The number in an `ftevent-` id. Raises InvalidRequest."""
        digits = event_id.removeprefix("ftevent-")
        if not event_id.startswith("ftevent-") or not (digits.isascii() and digits.isdecimal()) or len(digits) > 18:
            raise InvalidRequest(f"{event_id[:80]!r} is no event id; use the id of an event", param="after")
        return int(digits)

    def metrics(
        self,
        job_id: str,
        names: Collection[str] | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        *,
        time_from: float | None = None,
        time_to: float | None = None,
        limit: int | None = None,
        newest: bool = False,
        with_superseded: bool = False,
    ) -> list[StepRecord]:
        """Telemetry in step order, both ends of each range included; superseded steps are left out unless asked for.

        `names` keeps these metrics only. `limit` cuts after so many steps: the first ones, or with `newest` the last
        (still in step order). With superseded rows the order is (epoch, seq).
        """
        picked = self.picked(names, steps.c.metrics)
        query = sa.select(*_STEP_COLUMNS, *([steps.c.metrics] if picked is None else picked)).where(steps.c.job_id == job_id)
        if not with_superseded:
            query = query.where(steps.c.superseded.is_(False))
        query = query.where(*steps_between(step_from, step_to, time_from, time_to))
        way = sa.desc if newest else sa.asc
        columns = (steps.c.epoch, steps.c.seq) if with_superseded else (steps.c.step,)
        query = query.order_by(*(way(column) for column in columns))
        with self.database.read() as connection:
            self._job(connection, job_id)
            rows = connection.execute(query if limit is None else query.limit(limit)).all()
        ordered = reversed(rows) if newest else rows
        return [_step_record(row, names, is_picked=picked is not None) for row in ordered]

    def metric_texts(
        self,
        job_id: str,
        names: Sequence[str],
        step_from: int | None = None,
        step_to: int | None = None,
        *,
        time_from: float | None = None,
        time_to: float | None = None,
        limit: int,
    ) -> list[sa.Row[Any]] | None:
        """The same rows as `metrics`, unread: (step, epoch, seq, time, JSON of each name or None), for who passes them on as they are.

        None when the database cannot pick these names; ask `metrics` then.
        """
        picked = self.picked(names, steps.c.metrics)
        if picked is None:
            return None
        query = sa.select(steps.c.step, steps.c.epoch, steps.c.seq, steps.c.time, *picked).where(
            steps.c.job_id == job_id, steps.c.superseded.is_(False)
        )
        query = query.where(*steps_between(step_from, step_to, time_from, time_to)).order_by(steps.c.step).limit(limit)
        with self.database.read() as connection:
            self._job(connection, job_id)
            return list(connection.execute(query).all())

    def picked(self, names: Collection[str] | None, column: sa.Column[str]) -> list[sa.ColumnElement[Any]] | None:
        """Columns that take a few metrics out inside the database, which is ten times faster than reading all of them.

        None when that is not worth it, or a name cannot be spelt in SQLite's JSON paths.
        """
        if names is None or len(names) > MAX_PICKED or any(mark in name for name in names for mark in '"\\'):
            return None
        if self.database.is_sqlite:
            if sqlite3.sqlite_version_info < (3, 38):
                return None
            # Not json_extract: SQLite reads numbers to within a unit in the last place; `->` hands over their text.
            return [column.op("->", return_type=sa.Text())(f'$."{name}"') for name in names]
        return [sa.cast(sa.cast(column, postgresql.JSON).op("->")(name), sa.Text) for name in names]

    def metrics_after(self, job_id: str, after: tuple[int, int], limit: int = 1000) -> list[StepRecord]:
        """Telemetry rows after (epoch, seq), in that order, superseded ones included: what the metrics stream replays."""
        position = sa.tuple_(steps.c.epoch, steps.c.seq)
        query: sa.Select[Any] = (
            sa.select(*_STEP_COLUMNS, steps.c.metrics)
            .where(steps.c.job_id == job_id, position > sa.tuple_(*map(sa.literal, after)))
            .order_by(steps.c.epoch, steps.c.seq)
            .limit(limit)
        )
        with self.database.read() as connection:
            return [_step_record(row, None) for row in connection.execute(query)]

    def integrity(self, job_id: str) -> Integrity:
        """Whether steps 1 to the last are all there, once each."""
        counts = sa.and_(steps.c.job_id == job_id, steps.c.superseded.is_(False))
        with self.database.read() as connection:
            self._job(connection, job_id)
            number, last = connection.execute(sa.select(sa.func.count(), sa.func.max(steps.c.step)).where(counts)).one()
            again = sa.select(sa.func.count()).select_from(steps).where(steps.c.job_id == job_id, steps.c.superseded.is_(True))
            superseded = connection.execute(again).scalar_one()
            gap = sa.and_(job_events.c.job_id == job_id, job_events.c.type == "telemetry.gap")
            gaps = connection.execute(sa.select(sa.func.count()).select_from(job_events).where(gap)).scalar_one()
            missing: list[int] = []
            if last is not None and number != last:
                present = set(connection.execute(sa.select(steps.c.step).where(counts)).scalars())
                missing = [step for step in range(1, last + 1) if step not in present][:MAX_MISSING]
        return Integrity(steps=number, last_step=last or 0, missing=missing, superseded=superseded, gaps=gaps)

    # Checkpoints

    def checkpoints(
        self, job_id: str, *, after: str | None = None, limit: int = 100, order: Order = "desc", with_superseded: bool = False
    ) -> Page[CheckpointRecord]:
        """Published checkpoints that are still there, by step; `after` is a checkpoint id. Raises NotFound for the job."""
        query = sa.select(checkpoints).where(
            checkpoints.c.job_id == job_id, checkpoints.c.kind == "published", checkpoints.c.deleted_at.is_(None)
        )
        if not with_superseded:
            query = query.where(checkpoints.c.superseded.is_(False))
        with self.database.read() as connection:
            self._job(connection, job_id)
            if after is not None:
                edge = connection.execute(sa.select(checkpoints).where(checkpoints.c.id == after)).one_or_none()
                if edge is None:
                    raise InvalidRequest(f"after names no checkpoint: {after[:80]!r}; use an id from the list", param="after")
                position = sa.tuple_(checkpoints.c.step, checkpoints.c.epoch, checkpoints.c.id)
                mark = sa.tuple_(sa.literal(edge.step), sa.literal(edge.epoch), sa.literal(edge.id))
                query = query.where(position < mark if order == "desc" else position > mark)
            way = sa.desc if order == "desc" else sa.asc
            columns = (checkpoints.c.step, checkpoints.c.epoch, checkpoints.c.id)
            rows = connection.execute(query.order_by(*map(way, columns)).limit(limit + 1)).all()
        return Page([checkpoint_record(row) for row in rows[:limit]], len(rows) > limit)

    def get_checkpoint(self, checkpoint_id: str) -> CheckpointRecord:
        """The checkpoint. Raises NotFound, also for one that was deleted."""
        query = sa.select(checkpoints).where(checkpoints.c.id == checkpoint_id, checkpoints.c.deleted_at.is_(None))
        with self.database.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFound(f"no checkpoint has the id {checkpoint_id[:80]!r}; check it against the job's list")
        return checkpoint_record(row)

    def resume_candidates(self, job_id: str) -> list[CheckpointRecord]:
        """Resumable checkpoints the ledger has accepted and not found bad, newest first."""
        good = sa.and_(
            checkpoints.c.job_id == job_id, checkpoints.c.kind == "resume", checkpoints.c.superseded.is_(False),
            checkpoints.c.damaged.is_(False), checkpoints.c.deleted_at.is_(None),
        )  # fmt: skip
        query = sa.select(checkpoints).where(good).order_by(checkpoints.c.step.desc(), checkpoints.c.epoch.desc())
        with self.database.read() as connection:
            return [checkpoint_record(row) for row in connection.execute(query)]

    def stored_checkpoints(self, job_id: str) -> tuple[list[CheckpointRecord], list[CheckpointRecord]]:
        """Published and resume checkpoints not yet deleted, newest first."""
        query = sa.select(checkpoints).where(checkpoints.c.job_id == job_id, checkpoints.c.deleted_at.is_(None))
        with self.database.read() as connection:
            rows = connection.execute(query.order_by(checkpoints.c.step.desc(), checkpoints.c.epoch.desc())).all()
        records = [checkpoint_record(row) for row in rows]
        return [record for record in records if record.kind == "published"], [record for record in records if record.kind == "resume"]

    def mark_checkpoint(
        self, checkpoint_id: str, *, pinned: bool | None = None, damaged: bool | None = None, is_deleted: bool = False
    ) -> None:
        """Change what is known of a checkpoint; damage and deletion enter the job's history. Raises NotFound."""
        with self.database.write() as connection:
            row = connection.execute(sa.select(checkpoints).where(checkpoints.c.id == checkpoint_id)).one_or_none()
            if row is None:
                raise NotFound(f"no checkpoint has the id {checkpoint_id[:80]!r}")
            values: dict[str, Any] = {}
            if pinned is not None:
                values["pinned"] = pinned
            if damaged is not None:
                values["damaged"] = damaged
            if is_deleted:
                values["deleted_at"] = self.clock()
            self._job(connection, row.job_id, lock=True)
            connection.execute(sa.update(checkpoints).where(checkpoints.c.id == checkpoint_id).values(**values))
            data = {"checkpoint": checkpoint_id, "name": row.name, "epoch": row.epoch, "kind": row.kind}
            if damaged:
                message = f"Checkpoint {row.name} of attempt {row.epoch} is damaged and is not used."
                self._note(connection, row.job_id, "checkpoint.damaged", message, level="warn", step=row.step, data=data)
            elif is_deleted and row.kind == "published":
                message = f"Checkpoint {row.name} was deleted."
                self._note(connection, row.job_id, "checkpoint.deleted", message, step=row.step, data=data)


def steps_between(
    step_from: int | None, step_to: int | None, time_from: float | None, time_to: float | None
) -> list[sa.ColumnElement[bool]]:
    """Conditions on steps, one for each end that is given; both ends belong to the range."""
    ends = (
        None if step_from is None else steps.c.step >= step_from,
        None if step_to is None else steps.c.step <= step_to,
        None if time_from is None else steps.c.time >= time_from,
        None if time_to is None else steps.c.time <= time_to,
    )
    return [end for end in ends if end is not None]


def readings(values: Sequence[Any], names: Collection[str] | None, *, is_picked: bool) -> dict[str, Any]:
    """Metrics by name from what the database gave: one text for each name when they were picked inside it, else one for all."""
    if is_picked:
        return {name: from_json(value) for name, value in zip(names or (), values, strict=True) if value is not None}
    metrics: dict[str, Any] = from_json(values[0])
    return metrics if names is None else {name: metrics[name] for name in names if name in metrics}


def _step_record(row: sa.Row[Any], names: Collection[str] | None, *, is_picked: bool = False) -> StepRecord:
    metrics = readings(row[len(_STEP_COLUMNS) :], names, is_picked=is_picked)
    return StepRecord(row.step, row.epoch, row.seq, row.time, metrics, from_json(row.beta), row.superseded)
