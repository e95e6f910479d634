"""A sweep as the server shows it."""

from __future__ import annotations

from typing import Any, Literal

from grpo_engine.contract.study_view import FrontierPoint
from grpo_engine.contract.view import JobError, Phase, Progress, Status
from grpo_engine.contract.view_base import Number, View


class SweepMember(View):
    """One job of a sweep."""

    number: int
    name: str
    job_id: str
    beta: float | dict[str, Any] | None
    """As the variant gave it; null when it is in `overrides`, or the base's."""
    overrides: dict[str, Any]
    status: Status
    phase: Phase
    progress: Progress
    error: JobError | None
    ref_kl: Number | None
    """Of the last step, in nats per token by the job's own estimator; null when KL is not measured."""
    reward: Number | None
    """Mean reward of the last step."""
    applied_beta: Number | None
    """Of the last step."""
    best: FrontierPoint | None
    """Its checkpoint with the highest reward on the sweep's frontier; null when every one is beaten, or none is measured."""


class Sweep(View):
    """Several jobs that differ in a few settings and share model, data, their order, seed and reference."""

    id: str
    object: Literal["fine_tuning.sweep"] = "fine_tuning.sweep"
    created_at: int
    name: str | None
    status: Status
    """running while a member runs, else queued while one waits, else paused while one is paused; when all have ended: succeeded
    if every one did, failed if one failed, else cancelled."""
    is_terminal: bool
    spec: dict[str, Any]
    """The base as it was posted."""
    data: list[SweepMember]
    """In the order of the request."""
    frontier: list[FrontierPoint]
    """Published checkpoints of all members, by ascending KL."""
    best: FrontierPoint | None
    """The point of the frontier with the highest reward."""
    compare: str
    """Where the curves of all members lie side by side."""
