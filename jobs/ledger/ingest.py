"""Engine events into the database: each exactly once, in order, from the current attempt only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from grpo_engine.contract.event import EngineEvent, encode_nonfinite
from jobs.ledger.book import Book
from jobs.ledger.folding import fold, forget
from jobs.ledger.payloads import CheckpointSaved, ControlAnswered, RunRewound, StepCompleted, finite, parse
from jobs.ledger.records import JobRecord
from jobs.ledger.spelling import canonical_json, checkpoint_id
from jobs.lifecycle import ACTIVITY_PHASES
from jobs.tables import checkpoints, commands, job_events, jobs, steps


@dataclass(frozen=True)
class Ingested:
    """What became of a batch."""

    taken: int
    last: tuple[int, int]
    """(epoch, seq) of the latest event in the database."""
    has_gap: bool
    """Events are missing before the rest of the batch: read them from the file first."""


@dataclass
class _Batch:
    """Changes of one transaction, before they are written."""

    job: JobRecord
    seq: int
    step: int
    latest: str
    activity: str
    folded: int
    """Steps up to here need no folding."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    taken: int = 0


class IngestBook(Book):
    """Ingest of engine events."""

    def last_ingested(self, job_id: str) -> tuple[int, int]:
        """(epoch, seq) of the latest engine event in the database; seq 0 before the first of an attempt."""
        with self.database.read() as connection:
            return self._job(connection, job_id).ingested

    def ingest(self, job_id: str, events: Sequence[EngineEvent], *, from_file: bool = False) -> Ingested:
        """Take what follows what is known; repeats and other attempts' events are skipped.

        At a gap it stops and says so. `from_file`: the events come from events.jsonl itself, so what is missing there is
        missing for good, and a `telemetry.gap` in the history says so.
        """
        with self.database.read() as connection:
            job = self._job(connection, job_id)
        if not _news(job, events):
            return Ingested(0, job.ingested, False)
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            batch = _Batch(job, job.ingested[1], job.step, json.dumps(job.latest), job.activity, job.step)
            has_gap = False
            for event in _news(job, events):
                if event.seq <= batch.seq:
                    continue
                if event.seq != batch.seq + 1:
                    if not from_file:
                        has_gap = True
                        break
                    self._gap(connection, batch, event.seq)
                self._take(connection, batch, event)
            if batch.taken:
                self._write(connection, batch)
        return Ingested(batch.taken, (job.epoch, batch.seq), has_gap)

    def _take(self, connection: sa.Connection, batch: _Batch, event: EngineEvent) -> None:
        batch.seq = event.seq
        batch.taken += 1
        if event.type in ACTIVITY_PHASES:
            batch.activity = event.type
        try:
            if event.type == "step.completed":
                self._step(connection, batch, event)
                return
            if event.type == "run.rewound":
                self._rewind(connection, batch, parse(RunRewound, event).to_step)
            elif event.type == "checkpoint.saved":
                self._checkpoint(connection, batch.job, event)
            elif event.type in ("control.applied", "control.refused"):
                self._answer(connection, batch.job, event)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            data = {"event": event.type, "seq": event.seq, "problem": problem["msg"], "at": ".".join(map(str, problem["loc"]))}
            self._flush(connection, batch)
            message = f"Event {event.seq} ({event.type}) breaks its format and was kept as text only."
            self._note(connection, batch.job.id, "telemetry.invalid", message, level="warn", epoch=event.epoch, data=data)
        batch.events.append(
            {
                "job_id": batch.job.id, "epoch": event.epoch, "seq": event.seq, "time": event.time, "type": event.type[:64],
                "level": event.level, "step": event.step, "message": event.message, "data": canonical_json(encode_nonfinite(event.data)),
            }
        )  # fmt: skip

    def _step(self, connection: sa.Connection, batch: _Batch, event: EngineEvent) -> None:
        content = parse(StepCompleted, event)
        if event.step is None or event.step < 1:
            raise ValidationError.from_exception_data("step", [{"type": "missing", "loc": ("step",), "input": None}])
        if event.step <= batch.step:
            self._flush(connection, batch)
            same = sa.and_(steps.c.job_id == batch.job.id, steps.c.step == event.step, steps.c.superseded.is_(False))
            connection.execute(sa.update(steps).where(same).values(superseded=True))
            self._unfold(connection, batch, event.step - 1)
        metrics, beta = canonical_json(encode_nonfinite(content.metrics)), canonical_json(encode_nonfinite(content.beta))
        batch.steps.append(
            {
                "job_id": batch.job.id, "epoch": event.epoch, "seq": event.seq, "step": event.step, "time": event.time,
                "metrics": metrics, "beta": beta, "superseded": False,
            }
        )  # fmt: skip
        if event.step >= batch.step:
            batch.step = event.step
            batch.latest = f'{{"time":{json.dumps(event.time)},"metrics":{metrics},"beta":{beta}}}'

    def _rewind(self, connection: sa.Connection, batch: _Batch, to_step: int) -> None:
        self._flush(connection, batch)
        job_id = batch.job.id
        later = sa.and_(steps.c.job_id == job_id, steps.c.superseded.is_(False), steps.c.step > to_step)
        connection.execute(sa.update(steps).where(later).values(superseded=True))
        newer = sa.and_(checkpoints.c.job_id == job_id, checkpoints.c.step > to_step)
        connection.execute(sa.update(checkpoints).where(newer).values(superseded=True))
        self._unfold(connection, batch, to_step)
        query = sa.select(steps).where(steps.c.job_id == job_id, steps.c.superseded.is_(False)).order_by(steps.c.step.desc()).limit(1)
        row = connection.execute(query).one_or_none()
        batch.step = 0 if row is None else row.step
        batch.latest = "{}" if row is None else f'{{"time":{json.dumps(row.time)},"metrics":{row.metrics},"beta":{row.beta}}}'

    def _checkpoint(self, connection: sa.Connection, job: JobRecord, event: EngineEvent) -> None:
        saved = parse(CheckpointSaved, event)
        extra = {key: value for key, value in event.data.items() if key != "files"}
        values = {
            "step": saved.step,
            "kind": saved.kind,
            "created_at": event.time,
            "bytes": saved.bytes,
            "files": canonical_json([member.model_dump() for member in saved.files]),
            "ref_kl": finite(saved.ref_kl),
            "reward": finite(saved.reward),
            "beta": finite(saved.beta),
            "metrics": canonical_json(encode_nonfinite(extra)),
            "superseded": False,
            "damaged": False,
            "deleted_at": None,
        }
        same = sa.and_(checkpoints.c.job_id == job.id, checkpoints.c.epoch == event.epoch, checkpoints.c.name == saved.name)
        if connection.execute(sa.update(checkpoints).where(same).values(**values)).rowcount == 0:
            identity = {"id": checkpoint_id(job.id, event.epoch, saved.name), "job_id": job.id, "epoch": event.epoch, "name": saved.name}
            connection.execute(sa.insert(checkpoints).values(**identity, pinned=False, **values))

    def _answer(self, connection: sa.Connection, job: JobRecord, event: EngineEvent) -> None:
        answer = parse(ControlAnswered, event)
        connection.execute(
            sa.update(commands)
            .where(commands.c.job_id == job.id, commands.c.number == answer.command)
            .values(
                status=event.type.removeprefix("control."), answered_at=event.time, effective_step=answer.effective_step,
                answer=canonical_json(encode_nonfinite(event.data)),
            )
        )  # fmt: skip

    def _gap(self, connection: sa.Connection, batch: _Batch, found: int) -> None:
        self._flush(connection, batch)
        data = {"first": batch.seq + 1, "last": found - 1}
        message = f"Events {batch.seq + 1} to {found - 1} of attempt {batch.job.epoch} cannot be read from its file."
        self._note(connection, batch.job.id, "telemetry.gap", message, level="warn", epoch=batch.job.epoch, data=data)

    def _flush(self, connection: sa.Connection, batch: _Batch) -> None:
        if batch.steps:
            connection.execute(sa.insert(steps), batch.steps)
        if batch.events:
            connection.execute(sa.insert(job_events), batch.events)
        batch.steps, batch.events = [], []

    def _unfold(self, connection: sa.Connection, batch: _Batch, to_step: int) -> None:
        """Steps after `to_step` count no more, or no longer as they were."""
        forget(connection, batch.job.id, to_step)
        batch.folded = min(batch.folded, to_step)

    def _write(self, connection: sa.Connection, batch: _Batch) -> None:
        self._flush(connection, batch)
        fold(connection, batch.job.id, batch.folded, batch.step)
        connection.execute(
            sa.update(jobs)
            .where(jobs.c.id == batch.job.id)
            .values(
                ingested_epoch=batch.job.epoch, ingested_seq=batch.seq, step=batch.step, latest=batch.latest,
                activity=batch.activity, updated_at=self.clock(),
            )
        )  # fmt: skip


def _news(job: JobRecord, events: Sequence[EngineEvent]) -> list[EngineEvent]:
    """Events of the current attempt that are not known yet; a finished job and a fenced attempt have none."""
    if job.is_terminal:
        return []
    known = job.ingested[1] if job.ingested[0] == job.epoch else 0
    return [event for event in events if event.epoch == job.epoch and event.seq > known]
