"""What every part of the ledger shares: the database, the directories, the clock, and how a job moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from grpo_engine.contract.error import NotFound
from grpo_engine.contract.event import Level
from jobs.artifacts import Artifacts
from jobs.database import Database
from jobs.ledger.records import JobRecord
from jobs.ledger.rows import job_record
from jobs.ledger.spelling import canonical_json
from jobs.lifecycle import TRANSITIONS, State
from jobs.tables import job_events, jobs


class IllegalTransition(AssertionError):
    """The code asked for a transition the life cycle does not have: a defect."""


class LostRace(Exception):
    """Somebody else moved the job first; re-read it."""


@dataclass(frozen=True)
class Budgets:
    """How much bad luck a job survives."""

    max_crashes: int = 3
    max_worker_losses: int = 10
    max_stuck_attempts: int = 3
    retry_backoff_s: float = 1.0


class Book:
    """The base of the ledger's parts."""

    def __init__(
        self, database: Database, artifacts: Artifacts, *, budgets: Budgets | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.database = database
        self.artifacts = artifacts
        self.budgets = budgets or Budgets()
        self.clock = clock

    def _job(self, connection: sa.Connection, job_id: str, *, lock: bool = False) -> JobRecord:
        """The job; `lock` keeps other writers of PostgreSQL away until the end (SQLite has one writer anyway)."""
        query = sa.select(jobs).where(jobs.c.id == job_id)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is None:
            raise NotFound(f"no job has the id {job_id[:80]!r}; check it against the list of jobs")
        return job_record(row)

    def _move(self, connection: sa.Connection, job: JobRecord, to: State, message: str, *, level: Level = "info", **values: Any) -> None:
        """Compare-and-swap on (state, epoch), with a row in the history. Raises LostRace.

        `data` among the values goes to the history; the others are columns of `jobs`.
        """
        if to not in TRANSITIONS[job.state]:
            raise IllegalTransition(f"job {job.id} cannot go from {job.state} to {to}")
        now = self.clock()
        data = {"from": job.state, "to": to, **values.pop("data", {})}
        if to.is_terminal:
            values.setdefault("finished_at", now)
        values = {"status_reason": message, **values, "state": to, "updated_at": now}
        same = sa.and_(jobs.c.id == job.id, jobs.c.state == job.state, jobs.c.epoch == job.epoch)
        if connection.execute(sa.update(jobs).where(same).values(**values)).rowcount != 1:
            raise LostRace(job.id)
        epoch = int(values.get("epoch", job.epoch)) or None
        self._note(connection, job.id, f"job.{to}", message, level=level, epoch=epoch, data=data)

    def _note(
        self, connection: sa.Connection, job_id: str, kind: str, message: str, *,
        level: Level = "info", epoch: int | None = None, step: int | None = None, data: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """A life-cycle line in the job's history. The caller holds the job's row, so numbers grow along each history."""
        connection.execute(
            sa.insert(job_events).values(
                job_id=job_id, epoch=epoch, seq=None, time=self.clock(), type=kind, level=level, step=step,
                message=message, data=canonical_json(data or {}),
            )
        )  # fmt: skip
