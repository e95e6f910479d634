"""From rows of the database to records."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from grpo_engine.contract.command import Command
from jobs.ledger.records import CheckpointRecord, CommandRecord, EventRecord, JobError, JobRecord
from jobs.lifecycle import State, Wanted


def job_record(row: sa.Row[Any]) -> JobRecord:
    """A row of `jobs`."""
    error = None if row.error_code is None else JobError(row.error_code, row.error_message or "", row.error_param)
    return JobRecord(
        id=row.id, project=row.project, created_at=row.created_at, updated_at=row.updated_at, started_at=row.started_at,
        finished_at=row.finished_at, state=State(row.state), wanted=Wanted(row.wanted), epoch=row.epoch, not_before=row.not_before,
        dispatched_at=row.dispatched_at, published_at=row.published_at, queue=row.queue, spec_json=row.spec,
        training_path=row.training_path, validation_path=row.validation_path, resume_from=row.resume_from,
        status_reason=row.status_reason, error=error,
        num_steps=row.num_steps, step=row.step, latest=json.loads(row.latest), activity=row.activity,
        ingested=(row.ingested_epoch, row.ingested_seq), crashes=row.crashes, worker_losses=row.worker_losses,
        preemptions=row.preemptions, stuck_attempts=row.stuck_attempts, stuck_step=row.stuck_step,
        settings_version=row.settings_version,
    )  # fmt: skip


def event_record(row: sa.Row[Any]) -> EventRecord:
    """A row of `job_events`."""
    return EventRecord(
        number=row.id, job_id=row.job_id, time=row.time, type=row.type, level=row.level, message=row.message,
        step=row.step, epoch=row.epoch, seq=row.seq, data=json.loads(row.data),
    )  # fmt: skip


def checkpoint_record(row: sa.Row[Any]) -> CheckpointRecord:
    """A row of `checkpoints`."""
    return CheckpointRecord(
        id=row.id, job_id=row.job_id, epoch=row.epoch, name=row.name, step=row.step, kind=row.kind, created_at=row.created_at,
        bytes=row.bytes, files=json.loads(row.files), ref_kl=row.ref_kl, reward=row.reward, beta=row.beta,
        metrics=json.loads(row.metrics), superseded=row.superseded, damaged=row.damaged, pinned=row.pinned, deleted_at=row.deleted_at,
    )  # fmt: skip


def command_record(row: sa.Row[Any]) -> CommandRecord:
    """A row of `commands`."""
    return CommandRecord(
        job_id=row.job_id, command=Command.model_validate_json(row.body), created_at=row.created_at, status=row.status,
        answered_at=row.answered_at, effective_step=row.effective_step, answer=json.loads(row.answer),
    )  # fmt: skip
