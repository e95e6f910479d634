"""From the ledger's records to the objects of the answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from api.advisories import remarks_on
from api.queue_places import Place
from grpo_engine.contract import view
from grpo_engine.contract.view import NonFinite, Number
from jobs.ledger.lineage import LineageRecord
from jobs.ledger.promotions import PromotionRecord
from jobs.ledger.records import CheckpointRecord, CommandRecord, EventRecord, FileRecord, JobRecord, StepRecord
from jobs.lifecycle import State

ORGANIZATION = "local"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def answer(content: view.View, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Strict JSON of a view: views hold no NaN, and what they carry of the database's JSON is strict already."""
    return Response(content.model_dump_json(), status_code=status, headers=headers, media_type="application/json")


def as_number(raw: Any) -> Number | None:
    """A number as the engine spelled it; None for anything else."""
    if isinstance(raw, dict):
        return NonFinite(nonfinite=raw["nonfinite"]) if raw.get("nonfinite") in _NON_FINITE else None
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    return None


def as_float(raw: Any) -> float | None:
    """The same as a Python float, NaN and infinities included."""
    if isinstance(raw, float):
        return raw
    if isinstance(raw, dict):
        return _NON_FINITE.get(str(raw.get("nonfinite")))
    return float(raw) if isinstance(raw, int) and not isinstance(raw, bool) else None


def job_view(
    job: JobRecord, *, fine_tuned_model: str | None = None, place: Place | None = None, line: LineageRecord | None = None
) -> view.Job:
    """The Job object. `fine_tuned_model`: id of the last published checkpoint. `place`: where it waits.
    `line`: where its weights come from."""
    line = line or LineageRecord()
    spec: dict[str, Any] = json.loads(job.spec_json)
    grpo: dict[str, Any] = spec["method"]["grpo"]
    eta = _eta(job)
    return view.Job(
        id=job.id,
        created_at=int(job.created_at),
        started_at=_seconds(job.started_at),
        finished_at=_seconds(job.finished_at) if job.is_terminal else None,
        estimated_finish=eta,
        model=spec["model"],
        fine_tuned_model=fine_tuned_model if job.state is State.SUCCEEDED else None,
        organization_id=ORGANIZATION,
        status=job.status,
        phase=job.phase,
        is_terminal=job.is_terminal,
        status_reason=job.status_reason,
        error=error_view(job),
        attempt=job.epoch,
        training_file=spec["training_file"],
        validation_file=spec["validation_file"],
        seed=spec["seed"],
        user_provided_suffix=spec["suffix"],
        metadata=spec["metadata"],
        method=spec["method"],
        queue=None if place is None else view.Queue(position=place.ahead + 1, ahead=place.ahead, eta=place.eta, note=place.note),
        progress=progress_view(job),
        kl=_kl_state(job, spec["model"], grpo),
        resolved=grpo,
        warnings=remarks_on(job.spec_json).warnings,
        lineage=view.Lineage(
            root_model=line.root_model or spec["model"],
            parent_job=line.parent_job,
            parent_checkpoint=line.parent_checkpoint,
            forks=list(line.forks),
            sweep=None if line.sweep is None or line.sweep_member is None else view.SweepPlace(id=line.sweep, member=line.sweep_member),
        ),
    )


def progress_view(job: JobRecord) -> view.Progress:
    """How far it is."""
    return view.Progress(step=job.step, num_steps=job.num_steps, eta=_eta(job))


def outcome_view(job: JobRecord, fine_tuned_model: str | None) -> view.JobOutcome:
    """The end of a job that is terminal."""
    shown = job_view(job, fine_tuned_model=fine_tuned_model)
    assert shown.status in ("succeeded", "failed", "cancelled")
    return view.JobOutcome(
        job_id=job.id,
        status=shown.status,
        status_reason=shown.status_reason,
        error=shown.error,
        finished_at=shown.finished_at,
        last_step=job.step,
        fine_tuned_model=shown.fine_tuned_model,
    )


def event_view(event: EventRecord) -> view.JobEvent:
    """A line of the job's history."""
    return view.JobEvent(
        id=event.id,
        created_at=int(event.time),
        level=event.level,
        message=event.message,
        type="metrics" if event.type == "step.completed" else "message",
        event=event.type,
        step=event.step,
        epoch=event.epoch if event.seq is not None else None,
        seq=event.seq,
        data=event.data,
    )


def metric_row(row: StepRecord) -> dict[str, Any]:
    """Telemetry of a step, in the shape of `contract.view.MetricRow`; plain, because pages of them are long."""
    metrics = {name: raw for name, raw in row.metrics.items() if as_float(raw) is not None}
    return {"step": row.step, "epoch": row.epoch, "seq": row.seq, "logged_at": int(row.time), "metrics": metrics}


def checkpoint_view(record: CheckpointRecord, promotion: PromotionRecord | None = None) -> view.Checkpoint:
    """Published weights, and their promotion if there is one."""
    readings = {"ref_kl": record.ref_kl, "reward": record.reward, "beta": record.beta}
    metrics: dict[str, Number | int | None] = {"step": record.step, **{name: as_number(value) for name, value in readings.items()}}
    return view.Checkpoint(
        id=record.id,
        created_at=int(record.created_at),
        fine_tuned_model_checkpoint=record.id,
        fine_tuning_job_id=record.job_id,
        step_number=record.step,
        metrics=metrics,
        name=record.name,
        bytes=record.bytes,
        files=[view.CheckpointFile(name=file["name"], bytes=file["bytes"], sha256=file["sha256"]) for file in record.files],
        pinned=record.pinned,
        promotion=None
        if promotion is None
        else view.Promotion(promoted_at=int(promotion.promoted_at), actor=promotion.actor, gates=promotion.gates, note=promotion.note),
    )


def file_view(record: FileRecord) -> view.File:
    """An uploaded dataset."""
    return view.File(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created_at),
        filename=record.filename,
        sha256=record.sha256,
        rows=record.rows,
    )


def command_view(record: CommandRecord) -> view.ControlCommand:
    """A numbered change."""
    command, reason = record.command, record.answer.get("reason")
    return view.ControlCommand(
        number=record.number,
        created_at=int(record.created_at),
        actor=command.actor,
        status=record.status,
        beta=command.beta,
        target=command.target,
        learning_rate=command.learning_rate,
        effective_step=record.effective_step,
        old=record.answer.get("old"),
        new=record.answer.get("new"),
        reason=None if reason is None else str(reason),
    )


def error_view(job: JobRecord) -> view.JobError | None:
    """Why a job failed; None when it has not."""
    if job.error is None:
        return None
    return view.JobError(code=job.error.code, message=job.error.message, param=job.error.param)


def _kl_state(job: JobRecord, model: str, grpo: dict[str, Any]) -> view.KlState:
    has_reference = any(name.startswith("kl/ref/") for name in job.metrics)
    sha256 = job.beta.get("ref_sha256")
    return view.KlState(
        step=job.step,
        divergence=remarks_on(job.spec_json).divergence,
        ref_kl=as_number(job.metrics.get(f"kl/ref/{grpo['kl']['estimator']}/mean")),
        beta=as_number(job.metrics.get("beta/applied")),
        target=as_number(job.beta.get("target")),
        reference=view.Reference(model=model, sha256=sha256 if isinstance(sha256, str) else None) if has_reference else None,
    )


def _eta(job: JobRecord) -> int | None:
    step_s = as_float(job.metrics.get("time/step_s"))
    at = job.latest.get("time")
    if job.state is not State.RUNNING or step_s is None or not math.isfinite(step_s) or at is None:
        return None
    return int(float(at) + step_s * max(0, job.num_steps - job.step))


def _seconds(value: float | None) -> int | None:
    return None if value is None else int(value)
