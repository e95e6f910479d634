"""What the ledger returns: frozen records, one a thing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

from grpo_engine.contract.command import Command
from grpo_engine.contract.event import Level
from grpo_engine.contract.job import JobSpec
from jobs.lifecycle import Phase, State, Status, Wanted, phase_of, status_of

Item = TypeVar("Item")
Order = Literal["asc", "desc"]


@dataclass(frozen=True)
class Page(Generic[Item]):
    """One page of a list."""

    data: list[Item]
    has_more: bool


@dataclass(frozen=True)
class IdempotencyKey:
    """A client's promise that requests with this key are one request."""

    scope: str
    """Whose keys they are, for example the API key's id."""
    key: str
    body_sha256: str
    """`body_sha256(body)` of the decoded request."""


@dataclass(frozen=True)
class JobError:
    """Why a job failed."""

    code: str
    message: str
    param: str | None


@dataclass(frozen=True)
class JobRecord:
    """A job as the database knows it."""

    id: str
    project: str
    created_at: float
    updated_at: float
    started_at: float | None
    """When a worker first claimed it."""
    finished_at: float | None
    state: State
    wanted: Wanted
    epoch: int
    """Number of the latest attempt; 0 before the first."""
    not_before: float
    dispatched_at: float | None
    published_at: float | None
    queue: str
    spec_json: str
    """The resolved spec as canonical JSON."""
    training_path: str | None
    """Relative to the job directory."""
    validation_path: str | None
    resume_from: str | None
    """Checkpoint the current attempt continues from, relative to the job directory."""
    status_reason: str
    error: JobError | None
    num_steps: int
    step: int
    """Latest completed step that counts; 0 before the first."""
    latest: Mapping[str, Any]
    """That step's `time`, `metrics` and `beta`; empty before the first."""
    activity: str
    ingested: tuple[int, int]
    """(epoch, seq) of the latest engine event in the database."""
    crashes: int
    worker_losses: int
    preemptions: int
    stuck_attempts: int
    stuck_step: int
    settings_version: int
    """Changes with each change of settings; the ETag of `control`."""

    @cached_property
    def spec(self) -> JobSpec:
        """The resolved spec."""
        return JobSpec.model_validate_json(self.spec_json)

    @property
    def metadata(self) -> dict[str, str]:
        """The client's labels."""
        return dict(json.loads(self.spec_json)["metadata"])

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the latest step."""
        return dict(self.latest.get("metrics", {}))

    @property
    def beta(self) -> dict[str, Any]:
        """State of the beta rule after the latest step."""
        return dict(self.latest.get("beta", {}))

    @property
    def status(self) -> Status:
        """OpenAI's word."""
        return status_of(self.state)

    @property
    def phase(self) -> Phase:
        """Our word."""
        return phase_of(self.state, self.wanted, self.activity)

    @property
    def is_terminal(self) -> bool:
        """Nothing follows."""
        return self.state.is_terminal


@dataclass(frozen=True)
class EventRecord:
    """A line of a job's history: its life cycle, and every engine event but `step.completed` (see `StepRecord`)."""

    number: int
    """The database's own number; grows along a job's history."""
    job_id: str
    time: float
    type: str
    level: Level
    message: str
    step: int | None
    epoch: int | None
    seq: int | None
    """None for life-cycle events."""
    data: dict[str, Any]

    @property
    def id(self) -> str:
        """`ftevent-<number>`."""
        return f"ftevent-{self.number}"


@dataclass(frozen=True)
class StepRecord:
    """Telemetry of one step."""

    step: int
    epoch: int
    seq: int
    time: float
    metrics: dict[str, Any]
    beta: dict[str, Any]
    superseded: bool = False
    """A later attempt, or a rollback, did this step anew."""


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint the ledger has accepted."""

    id: str
    job_id: str
    epoch: int
    name: str
    step: int
    kind: Literal["published", "resume"]
    created_at: float
    bytes: int
    files: list[dict[str, Any]]
    """Each with name, bytes, sha256."""
    ref_kl: float | None
    reward: float | None
    beta: float | None
    metrics: dict[str, Any]
    superseded: bool
    damaged: bool
    pinned: bool
    deleted_at: float | None


@dataclass(frozen=True)
class CommandRecord:
    """A numbered instruction to a job and its answer."""

    job_id: str
    command: Command
    created_at: float
    status: Literal["pending", "applied", "refused"]
    answered_at: float | None
    effective_step: int | None
    answer: dict[str, Any]

    @property
    def number(self) -> int:
        """1, 2, 3 ... within the job."""
        return self.command.number


@dataclass(frozen=True)
class FileRecord:
    """An uploaded file; its bytes are `Artifacts.file_content(id)`."""

    id: str
    project: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    created_at: float
    rows: int | None


@dataclass(frozen=True)
class ApiKeyRecord:
    """An API key without its secret."""

    id: str
    name: str
    project: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked_at: float | None


@dataclass(frozen=True)
class Integrity:
    """Whether the telemetry of a job is whole."""

    steps: int
    """Steps that count."""
    last_step: int
    missing: list[int] = field(default_factory=list)
    """Steps below the last that are absent; at most the first 1000."""
    superseded: int = 0
    """Rows that a later attempt or rollback replaced."""
    gaps: int = 0
    """Times a part of an events file could not be read."""
