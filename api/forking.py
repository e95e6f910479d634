"""A new job from a checkpoint of another: the same settings but for the overrides, measured against the root of the line.

"The root" is what the parent was measured against: its own reference if that has a name, else the weights it started from. A
fork therefore keeps counting KL from where the line began; KL from the checkpoint on would hide what was spent before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from api.deps import Services
from grpo_engine.contract.base import Strict
from grpo_engine.contract.error import Conflict, InvalidRequest, NotFound
from grpo_engine.contract.presets import merge_settings
from jobs.ledger.records import CheckpointRecord, JobRecord
from jobs.weights import CHECKPOINT_ID


class Fork(Strict):
    """What to go on from, and what to change."""

    checkpoint: str | None = Field(default=None, max_length=80)
    """A published checkpoint of the job; null = the newest."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Merged into the job's resolved settings, for example `{"method": {"grpo": {"beta": 0.08}}}`."""
    suffix: str | None = None
    """Of the new job; null = none."""


def forked_spec(services: Services, job: JobRecord, wanted: Fork) -> dict[str, Any]:
    """The body of the create that makes the fork. Raises InvalidRequest, NotFound, or Conflict when there is no checkpoint."""
    _check_overrides(wanted.overrides)
    checkpoint = _checkpoint(services, job, wanted.checkpoint)
    spec: dict[str, Any] = json.loads(job.spec_json)
    grpo = spec["method"]["grpo"]
    grpo["preset"] = None
    grpo["reference"]["source"] = _root_reference(job, grpo["reference"]["source"])
    merged = merge_settings(spec, wanted.overrides)
    return {**merged, "model": checkpoint.id, "suffix": wanted.suffix}


def inherited_files(services: Services, job: JobRecord) -> dict[str, Path]:
    """The job's own copies of its files by upload id: the uploads may be gone."""
    directory = services.artifacts.job_dir(job.id)
    pairs = ((job.spec.training_file, job.training_path), (job.spec.validation_file, job.validation_path))
    return {file_id: directory / path for file_id, path in pairs if file_id is not None and path is not None}


def _root_reference(job: JobRecord, source: str) -> str:
    """The parent's reference, spelled so that it means the same in another job."""
    if source not in ("initial", "base"):
        return source
    return f"checkpoint:{job.spec.model}" if CHECKPOINT_ID.fullmatch(job.spec.model) else f"model:{job.spec.model}"


def _checkpoint(services: Services, job: JobRecord, wanted: str | None) -> CheckpointRecord:
    if wanted is None:
        newest = services.ledger.checkpoints(job.id, limit=1).data
        if not newest:
            raise Conflict(f"job {job.id} has published no checkpoint yet; wait for one", param="checkpoint")
        return newest[0]
    try:
        record = services.ledger.get_checkpoint(wanted)
    except NotFound as error:
        raise InvalidRequest(error.message, param="checkpoint") from error
    if record.job_id != job.id or record.kind != "published":
        raise InvalidRequest(f"{wanted!r} is no published checkpoint of job {job.id}; list its checkpoints", param="checkpoint")
    return record


def _check_overrides(overrides: dict[str, Any]) -> None:
    for name, remedy in (("model", "name the checkpoint"), ("suffix", "give suffix beside overrides")):
        if name in overrides:
            raise InvalidRequest(f"overrides.{name}: a fork has its own; {remedy}", param=f"overrides.{name}")
    method = overrides.get("method", {})
    grpo = method.get("grpo", {}) if isinstance(method, dict) else None
    if not isinstance(method, dict) or method.get("type", "grpo") != "grpo":
        raise InvalidRequest("overrides.method must be an object with grpo; a fork keeps its method", param="overrides.method")
    if not isinstance(grpo, dict):
        raise InvalidRequest("overrides.method.grpo must be an object", param="overrides.method.grpo")
    if grpo.get("preset") is not None:
        message = "a fork starts from resolved settings, over which a preset would do nothing; create a job of that preset instead"
        raise InvalidRequest(message, param="overrides.method.grpo.preset")
