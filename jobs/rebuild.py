"""A database from the job directories, for when the old one is lost, and a copy of it for when it is not.

`job.json` was written before the job was accepted, and attempts keep their events and verdicts, so jobs, telemetry and
checkpoints come back. API keys, names of uploads and idempotency of deleted directories live in the database alone: they
come from `backup`. A job that had not ended is paused, so that nobody is surprised by work starting; resume it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from grpo_engine.contract.error import Conflict, GrpoError, InvalidRequest
from grpo_engine.contract.job import JobSpec
from jobs.artifacts import fsync_dir
from jobs.database import DatabaseDamaged
from jobs.event_files import read_events
from jobs.ledger import IdempotencyKey, JobRecord, Ledger, canonical_json
from jobs.lifecycle import State, Wanted
from jobs.tables import jobs


@dataclass
class Rebuilt:
    """What a rebuild found."""

    jobs: list[str] = field(default_factory=list)
    steps: int = 0
    problems: list[str] = field(default_factory=list)
    """One sentence for each directory that could not be restored."""


def refuse_emptied(ledger: Ledger) -> None:
    """Before anything is served: raises DatabaseDamaged when the database knows no job and jobs were run here.

    A file that was cut to nothing, or is missing, is a new database to SQLite; to serve it would be to forget every job. A
    directory without an attempt proves nothing: its job may never have been accepted.
    """
    if ledger.list_jobs(limit=1).data:
        return
    left = [job_id for job_id in ledger.artifacts.job_ids() if ledger.artifacts.epochs(job_id)]
    if left:
        ledger.close()
        raise DatabaseDamaged(
            f"the database is empty, and {len(left)} jobs were run in {ledger.artifacts.data_dir}; stop the server, restore the backup "
            "or run `grpo admin rebuild`, which restores jobs, metrics and checkpoints from the job directories (keys and uploads "
            "come from the backup); to begin anew, give another data directory"
        )


def rebuild(ledger: Ledger) -> Rebuilt:
    """Fill an empty ledger from the job directories. Raises Conflict when it already holds jobs."""
    if ledger.list_jobs(limit=1).data:
        raise Conflict("the database already holds jobs; rebuild works on an empty one: stop the server and move the old file away")
    found = Rebuilt()
    for job_id in ledger.artifacts.job_ids():
        try:
            found.steps += _restore(ledger, job_id)
        except (GrpoError, ValueError, KeyError, OSError) as error:
            found.problems.append(f"{job_id}: {type(error).__name__}: {error}")
        else:
            found.jobs.append(job_id)
    for job_id in found.jobs:
        with ledger.database.write() as connection:
            ledger.record_lineage(connection, job_id, ledger.get_job(job_id).spec.model)
    _restore_sweeps(ledger, found)
    return found


def _restore_sweeps(ledger: Ledger, found: Rebuilt) -> None:
    """Membership from each job.json; a sweep of which jobs are missing is a problem."""
    for job_id in found.jobs:
        content = ledger.artifacts.read_job_json(job_id)
        if content.get("sweep") is None:
            continue
        try:
            ledger.restore_membership(job_id, str(content["project"]), content["sweep"])
        except (IntegrityError, KeyError, TypeError, ValueError) as error:
            found.problems.append(f"{job_id}: its place in a sweep cannot be restored: {type(error).__name__}: {error}")
    after: str | None = None
    while True:
        page = ledger.list_sweeps(after=after, limit=100)
        for sweep in page.data:
            expected = len(sweep.request.get("variants", ()))
            if len(sweep.members) != expected:
                found.problems.append(f"{sweep.id}: {len(sweep.members)} of its {expected} jobs were found")
        if not page.has_more:
            return
        after = page.data[-1].id


def backup(ledger: Ledger, target: Path) -> None:
    """A consistent copy of a SQLite database while the server runs. Raises InvalidRequest for PostgreSQL, or when the file exists."""
    if not ledger.database.is_sqlite:
        raise InvalidRequest("the database is PostgreSQL; back it up with pg_dump")
    if target.exists():
        raise InvalidRequest(f"{target} exists; name a new file")
    temporary = target.with_name(target.name + ".partial")
    temporary.unlink(missing_ok=True)
    with ledger.database.read() as connection:
        source = connection.connection.driver_connection
        assert isinstance(source, sqlite3.Connection)
        copy = sqlite3.connect(temporary)
        try:
            source.backup(copy)
        finally:
            copy.close()
    temporary.rename(target)
    fsync_dir(target.parent)


def _restore(ledger: Ledger, job_id: str) -> int:
    """One job from its directory; the number of steps that count."""
    content = ledger.artifacts.read_job_json(job_id)
    if content["id"] != job_id:
        raise ValueError(f"job.json belongs to {content['id']}")
    spec = JobSpec.model_validate_json(canonical_json(content["spec"]))
    key = None if content["idempotency"] is None else IdempotencyKey(**content["idempotency"])
    ledger.restore_job(
        job_id, float(content["created_at"]), spec, project=str(content["project"]), training=content["training_path"],
        validation=content["validation_path"], idempotency=key,
    )  # fmt: skip
    epochs = ledger.artifacts.epochs(job_id)
    for epoch in epochs:
        _replay(ledger, job_id, epoch)
    for record in [record for records in ledger.stored_checkpoints(job_id) for record in records]:
        if not ledger.artifacts.checkpoint_dir(job_id, record.epoch, record.name).is_dir():
            ledger.mark_checkpoint(record.id, is_deleted=True)
    job = _conclude(ledger, job_id, epochs[-1] if epochs else 0)
    return ledger.integrity(job.id).steps


def _replay(ledger: Ledger, job_id: str, epoch: int) -> None:
    """Ingest one attempt's events as if it were the current one."""
    with ledger.database.write() as connection:
        values: dict[str, Any] = {"epoch": epoch, "ingested_epoch": epoch, "ingested_seq": 0}
        connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(**values))
    path, offset = ledger.artifacts.events_path(job_id, epoch), 0
    while True:
        events, after = read_events(path, offset)
        if after == offset:
            return
        ledger.ingest(job_id, events, from_file=True)
        offset = after


def _conclude(ledger: Ledger, job_id: str, epoch: int) -> JobRecord:
    """The job's state from its last attempt's verdict."""
    job = ledger.get_job(job_id)
    outcome = ledger.artifacts.outcome(job_id, epoch) if epoch else None
    values: dict[str, Any] = {"wanted": Wanted.PAUSE, "state": State.PAUSED}
    reason = "Restored from its directory; resume it to go on."
    if outcome is not None and outcome.status == "succeeded":
        values, reason = {"wanted": Wanted.RUN, "state": State.SUCCEEDED}, outcome.message
    elif outcome is not None and outcome.reason == "cancel":
        values, reason = {"wanted": Wanted.CANCEL, "state": State.CANCELLED}, "Cancelled by request."
    elif outcome is not None and outcome.status == "failed" and not outcome.retryable:
        values = {"wanted": Wanted.RUN, "state": State.FAILED, "error_code": outcome.reason, "error_message": outcome.message}
        reason = outcome.message
    if values["state"].is_terminal:
        path = ledger.artifacts.attempt_dir(job_id, epoch) / "outcome.json"
        values["finished_at"] = path.stat().st_mtime
    if epoch:
        values["started_at"] = ledger.artifacts.attempt_dir(job_id, epoch).stat().st_ctime if job.started_at is None else job.started_at
    with ledger.database.write() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(status_reason=reason, **values))
        ledger.note_restored(connection, job_id, reason)
    return ledger.get_job(job_id)
