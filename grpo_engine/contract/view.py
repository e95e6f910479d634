"""What the server shows: the objects in its answers, shaped like OpenAI's, with our own fields beside them.

Times are whole Unix seconds, UTC. A number that can be NaN or infinite is spelled `{"value": null, "nonfinite": "nan"}`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpo_engine.contract.checkpoint_view import Checkpoint, CheckpointFile, Promotion
from grpo_engine.contract.event import Level
from grpo_engine.contract.metric_view import Bucket, Integrity, MetricPage, MetricRow, MetricSeries, Point, SampledMetrics
from grpo_engine.contract.probe_view import Probe
from grpo_engine.contract.view_base import Deleted, JobWarning, NonFinite, Number, Page, Problem, ProblemError, View

__all__ = [
    "Bucket", "Checkpoint", "CheckpointFile", "ControlCommand", "ControlSettings", "Deleted", "File", "GraderRun", "Integrity", "Job",
    "JobError", "JobEvent", "JobOutcome", "JobWarning", "KlState", "Lineage", "MetricPage", "MetricRow", "MetricSeries", "Model",
    "NonFinite", "Number", "Page", "Phase", "Point", "Probe", "Problem", "ProblemError", "Progress", "Promotion", "Queue", "Reference",
    "SampledMetrics", "Status", "SweepPlace", "Validated", "View",
]  # fmt: skip

Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
Phase = Literal[
    "validating",
    "queued",
    "provisioning",
    "rolling_out",
    "training",
    "checkpointing",
    "pausing",
    "paused",
    "resuming",
    "cancelling",
    "publishing",
    "terminal",
]


class JobError(View):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class Queue(View):
    """Place of a job that waits."""

    position: int
    """1 = next."""
    ahead: int
    eta: int | None = None
    """Unix second at which it should start, from measured step times; null while unknown."""
    note: str | None = None
    """Why it cannot start: no live worker serves its queue."""


class Progress(View):
    """How far the job is."""

    step: int
    """Last completed step; 0 before the first."""
    num_steps: int
    eta: int | None = None
    """Unix second at which it should end; null while unknown."""


class Reference(View):
    """The frozen distribution KL is measured against."""

    model: str
    sha256: str | None = None
    """Of its weights; null until the engine has loaded them."""


class KlState(View):
    """What the job calls KL, and KL and beta of the last completed step."""

    step: int
    """0 before the first."""
    divergence: str
    """In words: which divergence, its estimator, and how it enters training."""
    ref_kl: Number | None = None
    """Nats per token, by the job's own estimator; null when KL is not measured."""
    beta: Number | None = None
    """Applied at that step."""
    target: Number | None = None
    reference: Reference | None = None


class SweepPlace(View):
    """The sweep a job is part of."""

    id: str
    member: str
    """The job's name in it."""


class Lineage(View):
    """Where the weights come from."""

    root_model: str
    """The base model at the beginning of the line."""
    parent_job: str | None = None
    parent_checkpoint: str | None = None
    forks: list[str] = []
    """Jobs that start from a checkpoint of this one, oldest first."""
    sweep: SweepPlace | None = None


class Job(View):
    """A training job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    started_at: int | None = None
    finished_at: int | None = None
    estimated_finish: int | None = None
    model: str
    fine_tuned_model: str | None = None
    """Id of the last published checkpoint, once the job has succeeded."""
    organization_id: str
    status: Status
    phase: Phase
    is_terminal: bool
    status_reason: str | None = None
    error: JobError | None = None
    attempt: int
    """Number of the current attempt; 0 before the first."""
    training_file: str | None = None
    validation_file: str | None = None
    result_files: list[str] = []
    trained_tokens: int | None = None
    seed: int
    hyperparameters: dict[str, Any] = {}
    """Empty: OpenAI fills it for supervised jobs only."""
    integrations: list[Any] = []
    user_provided_suffix: str | None = None
    metadata: dict[str, str] = {}
    method: dict[str, Any]
    queue: Queue | None = None
    progress: Progress
    kl: KlState | None = None
    resolved: dict[str, Any]
    """Every setting of `method.grpo` after presets and defaults."""
    warnings: list[JobWarning] = []
    lineage: Lineage


class JobOutcome(View):
    """The end of a job, for sensors that wait for it."""

    object: Literal["fine_tuning.job.outcome"] = "fine_tuning.job.outcome"
    job_id: str
    status: Literal["succeeded", "failed", "cancelled"]
    status_reason: str | None
    error: JobError | None
    finished_at: int | None
    last_step: int
    fine_tuned_model: str | None


class Validated(View):
    """A job that would be accepted."""

    object: Literal["fine_tuning.job.validation"] = "fine_tuning.job.validation"
    is_valid: Literal[True] = True
    resolved: dict[str, Any]
    """The whole job after presets and defaults."""
    rows: int
    """Usable rows of the training file."""
    disk_bytes_needed: int | None
    """Estimate; null when the model's size is not known before it is fetched."""
    warnings: list[JobWarning] = []
    probe: Probe | None = None
    """What a few rollouts found; null unless `probe=true` asked for them."""


class JobEvent(View):
    """Something that happened to a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Level
    message: str
    type: Literal["message", "metrics"]
    """OpenAI's two kinds; `event` is finer."""
    event: str
    """Typed name, for example `step.completed`."""
    step: int | None = None
    epoch: int | None = None
    """Attempt the engine said it in; null for life-cycle events."""
    seq: int | None = None
    data: dict[str, Any]


class File(View):
    """An uploaded dataset."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["fine-tune"] = "fine-tune"
    status: Literal["processed"] = "processed"
    status_details: str | None = None
    expires_at: None = None
    sha256: str | None = None
    rows: int | None = None
    """Rows found in it."""


class Model(View):
    """A model a job may start from."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    kind: Literal["builtin", "local", "checkpoint"]
    promoted_at: int | None = None
    """When a checkpoint passed its gates."""


class ControlSettings(View):
    """What can be changed while the job runs, as last known."""

    object: Literal["fine_tuning.job.control"] = "fine_tuning.job.control"
    beta: Number | None
    """Of the next step."""
    target: Number | None
    learning_rate: Number | None
    """Before warm-up and decay."""
    commands: list[ControlCommand]


class ControlCommand(View):
    """A numbered change and what became of it."""

    number: int
    object: Literal["fine_tuning.job.control.command"] = "fine_tuning.job.control.command"
    created_at: int
    actor: str
    status: Literal["pending", "applied", "refused"]
    beta: Number | None = None
    target: Number | None = None
    learning_rate: Number | None = None
    effective_step: int | None = None
    """First step it is in force."""
    old: dict[str, Any] | None = None
    """What it replaced."""
    new: dict[str, Any] | None = None
    reason: str | None = None
    """Why it was refused."""


class GraderRun(View):
    """A grader's verdict on one sample, in OpenAI's shape."""

    reward: Number | None
    sub_rewards: dict[str, Number | None]
    metadata: dict[str, Any]
    model_grader_token_usage_per_model: dict[str, Any] = Field(default_factory=dict)


ControlSettings.model_rebuild()
