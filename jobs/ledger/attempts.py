"""The life of attempts, as the dispatcher writes it: dispatched, published, claimed, ended, lost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from grpo_engine.contract.event import Level, Outcome
from jobs.ledger.book import Book, LostRace
from jobs.ledger.records import JobRecord
from jobs.lifecycle import State, Wanted
from jobs.notices import Notice
from jobs.tables import commands, job_events, jobs
from jobs.traces import HEADER, TraceContext, job_span

MAX_BACKOFF_S = 300.0
LIVE_STATES = frozenset({State.DISPATCHED, State.RUNNING, State.STOPPING})


@dataclass(frozen=True)
class Lost:
    """An attempt whose worker vanished without a verdict."""

    message: str


@dataclass(frozen=True)
class Void:
    """An attempt that no worker ever had."""

    message: str


class AttemptBook(Book):
    """Attempts."""

    def dispatch(self, job_id: str, *, from_epoch: int, resume_step: int | None = None, resume_from: str | None = None) -> JobRecord | None:
        """Mint the next epoch of a queued job. None: it moved meanwhile.

        `resume_from` is the checkpoint of `resume_step`, relative to the job directory; None starts at step 1.

        Without a checkpoint to resume from, settings that were changed before are asked for again: no engine knows them.
        """
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            if job.state is not State.QUEUED or job.epoch != from_epoch:
                return None
            origin = self.origin(connection, job_id)
            trace = {} if origin is None else {HEADER: str(job_span(job_id, origin))}
            start = "from the start" if resume_step is None else f"from step {resume_step}"
            self._move(
                connection, job, State.DISPATCHED, f"Attempt {job.epoch + 1} waits for a worker, {start}.",
                wanted=Wanted.RUN, epoch=job.epoch + 1, dispatched_at=self.clock(), published_at=None, activity="",
                ingested_epoch=job.epoch + 1, ingested_seq=0,
                resume_from=resume_from, data={"resume_step": resume_step, "resume_from": resume_from, **trace},
            )  # fmt: skip
            if resume_step is None:
                connection.execute(
                    sa.update(commands)
                    .where(commands.c.job_id == job_id, commands.c.status == "applied")
                    .values(status="pending", answered_at=None, effective_step=None)
                )
            return self._job(connection, job_id)

    def trace_of(self, job_id: str) -> TraceContext:
        """The job's span, of which everything that happens to it is a part."""
        with self.database.read() as connection:
            return job_span(job_id, self.origin(connection, job_id))

    def origin(self, connection: sa.Connection, job_id: str) -> TraceContext | None:
        """The span of the request that created the job; None when nobody traced it."""
        first = sa.select(job_events.c.data).where(job_events.c.job_id == job_id, job_events.c.type == "job.created")
        text = connection.execute(first.order_by(job_events.c.id).limit(1)).scalar_one_or_none()
        return None if text is None else TraceContext.parse(json.loads(text).get(HEADER))

    def mark_published(self, job_id: str, epoch: int) -> None:
        """The broker took the attempt's message."""
        with self.database.write() as connection:
            same = sa.and_(jobs.c.id == job_id, jobs.c.epoch == epoch, jobs.c.state == State.DISPATCHED)
            connection.execute(sa.update(jobs).where(same).values(published_at=self.clock()))

    def mark_running(self, job_id: str, epoch: int, worker: str) -> JobRecord | None:
        """A worker holds the claim. None: the job has moved already."""
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            if job.epoch != epoch or job.state is not State.DISPATCHED:
                return None
            started = self.clock() if job.started_at is None else job.started_at
            message = f"Attempt {epoch} runs on {worker}."
            self._move(connection, job, State.RUNNING, message, started_at=started, data={"worker": worker})
            return self._job(connection, job_id)

    def note_stall(self, job_id: str, epoch: int, message: str, *, kind: Literal["job.stalled", "job.recovered"]) -> None:
        """A running attempt has fallen silent, or speaks again: shown as `status_reason`, kept in the history."""
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            if job.epoch != epoch or job.state is not State.RUNNING:
                return
            connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(status_reason=message, updated_at=self.clock()))
            level: Level = "warn" if kind == "job.stalled" else "info"
            self._note(connection, job_id, kind, message, level=level, epoch=epoch, step=job.step)

    def note_notice(self, job_id: str, notice: Notice) -> None:
        """What a worker had to say about an attempt, whatever state the job is in. Raises NotFound."""
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            data = {"worker": notice.worker, **notice.data}
            self._note(connection, job.id, notice.type, notice.message, level=notice.level, epoch=notice.epoch, data=data)

    def settle(self, job_id: str, epoch: int, ending: Outcome | Lost | Void) -> JobRecord | None:
        """Draw the consequence of an attempt's end from its verdict, what is wanted, and the budgets. None: not the current attempt."""
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            if job.epoch != epoch or job.state not in LIVE_STATES:
                return None
            if job.state is State.DISPATCHED and not isinstance(ending, Void):
                # Claimed and ended between two looks: the history shows both.
                self._move(connection, job, State.RUNNING, f"Attempt {epoch} ran.", started_at=job.started_at or self.clock())
                job = self._job(connection, job_id)
            try:
                self._settle(connection, job, ending)
            except LostRace:
                return None
            return self._job(connection, job_id)

    def _settle(self, connection: sa.Connection, job: JobRecord, ending: Outcome | Lost | Void) -> None:
        if isinstance(ending, Outcome) and ending.status == "succeeded":
            self._move(connection, job, State.SUCCEEDED, ending.message, data={"reason": ending.reason})
        elif job.wanted is Wanted.CANCEL:
            self._move(connection, job, State.CANCELLED, "Cancelled by request.")
        elif isinstance(ending, Void):
            to = State.PAUSED if job.wanted is Wanted.PAUSE else State.QUEUED
            self._move(connection, job, to, ending.message)
        elif isinstance(ending, Lost):
            self._lose(connection, job, ending)
        elif ending.reason == "worker_lost":
            self._lose(connection, job, Lost(ending.message))
        elif ending.status == "stopped":
            self._stopped(connection, job, ending)
        elif ending.retryable:
            self._crashed(connection, job, ending)
        else:
            self._fail(connection, job, ending.reason, ending.message, param=ending.param)

    def _stopped(self, connection: sa.Connection, job: JobRecord, outcome: Outcome) -> None:
        data = {"reason": outcome.reason, "last_step": outcome.last_step}
        asked = job.wanted is Wanted.PAUSE or (job.wanted is Wanted.RUN and outcome.reason in ("pause", "guardrail"))
        if asked:
            self._move(connection, job, State.PAUSED, outcome.message, wanted=Wanted.PAUSE, data=data)
        elif job.wanted is Wanted.REQUEUE:
            self._move(connection, job, State.QUEUED, outcome.message, wanted=Wanted.RUN, not_before=0.0, data=data)
        else:
            message = f"The worker drained after step {outcome.last_step}; another attempt continues."
            again = job.preemptions + 1
            self._move(connection, job, State.QUEUED, message, wanted=Wanted.RUN, not_before=0.0, preemptions=again, data=data)

    def _crashed(self, connection: sa.Connection, job: JobRecord, outcome: Outcome) -> None:
        crashes = job.crashes + 1
        stuck = self._stuck(job)
        if stuck["stuck_attempts"] >= self.budgets.max_stuck_attempts:
            attempts = stuck["stuck_attempts"]
            message = f"{attempts} attempts in a row ended after step {job.step}; the last one: {outcome.message}"
            self._fail(connection, job, "poison", message, crashes=crashes, **stuck)
        elif crashes > self.budgets.max_crashes:
            self._fail(
                connection, job, outcome.reason, f"Crashed {crashes} times; the last one: {outcome.message}", crashes=crashes, **stuck
            )
        else:
            delay = min(MAX_BACKOFF_S, self.budgets.retry_backoff_s * 2 ** (crashes - 1))
            data = {"reason": outcome.reason, "retry_in_s": delay}
            self._retry(connection, job, f"Attempt {job.epoch} crashed: {outcome.message}", delay, data, crashes=crashes, **stuck)

    def _lose(self, connection: sa.Connection, job: JobRecord, lost: Lost) -> None:
        losses = job.worker_losses + 1
        stuck = self._stuck(job)
        if stuck["stuck_attempts"] >= self.budgets.max_stuck_attempts:
            message = f"{stuck['stuck_attempts']} attempts in a row ended after step {job.step}; the last one: {lost.message}"
            self._fail(connection, job, "poison", message, worker_losses=losses, **stuck)
        elif losses > self.budgets.max_worker_losses:
            message = f"{losses} workers were lost; the last one: {lost.message}"
            self._fail(connection, job, "worker_lost", message, worker_losses=losses, **stuck)
        else:
            self._retry(connection, job, lost.message, 0.0, {"reason": "worker_lost"}, worker_losses=losses, **stuck)

    def _retry(self, connection: sa.Connection, job: JobRecord, message: str, delay: float, data: dict[str, Any], **values: Any) -> None:
        to = State.PAUSED if job.wanted is Wanted.PAUSE else State.QUEUED
        wanted = Wanted.PAUSE if to is State.PAUSED else Wanted.RUN
        self._move(connection, job, to, message, level="warn", wanted=wanted, not_before=self.clock() + delay, data=data, **values)

    def _fail(self, connection: sa.Connection, job: JobRecord, code: str, message: str, *, param: str | None = None, **values: Any) -> None:
        self._move(
            connection, job, State.FAILED, message, level="error", error_code=code, error_message=message, error_param=param,
            data={"reason": code}, **values,
        )  # fmt: skip

    def _stuck(self, job: JobRecord) -> dict[str, Any]:
        """Attempts in a row, this one included, that died after the same step."""
        return {"stuck_attempts": job.stuck_attempts + 1 if job.step == job.stuck_step else 1, "stuck_step": job.step}
