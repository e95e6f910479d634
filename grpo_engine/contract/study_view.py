"""Answers about runs that are over or under way: what guardrails would have done, and how jobs compare."""

from __future__ import annotations

from typing import Literal

from grpo_engine.contract.view_base import Number, View


class ReplayedEvent(View):
    """Something that would have happened."""

    step: int
    kind: Literal["fired", "cleared", "acted"]
    detector: str
    message: str


class GuardrailReplay(View):
    """A dry run of detectors and guardrails over a job's metrics. What an action would have changed later is not known."""

    object: Literal["fine_tuning.job.guardrails.replay"] = "fine_tuning.job.guardrails.replay"
    job_id: str
    num_steps: int
    """Steps read."""
    last_step: int
    data: list[ReplayedEvent]
    """In the order of steps."""


class ComparedPoint(View):
    """A metric at a step; `x` is the step, or KL to the reference at that step."""

    step: int
    x: float
    value: Number


class ComparedSeries(View):
    """One metric of one job."""

    name: str
    unit: str | None
    num_points: int
    """Before thinning."""
    points: list[ComparedPoint]
    """In step order."""


class ComparedJob(View):
    """A job's curves."""

    job_id: str
    status: str
    model: str
    user_provided_suffix: str | None
    kl_metric: str
    """The metric `align=kl` takes as x: KL to the reference by the job's own estimator."""
    last_step: int
    series: list[ComparedSeries]


class FrontierPoint(View):
    """A published checkpoint by what it costs and what it earns."""

    checkpoint_id: str
    job_id: str
    step: int
    ref_kl: float | None
    reward: float | None
    beta: float | None
    is_on_frontier: bool
    """No other checkpoint has a higher reward at the same or a lower KL, or the same at a lower one. Never true when unmeasured."""


class Comparison(View):
    """Jobs side by side, and the reward-KL frontier over their checkpoints."""

    object: Literal["fine_tuning.comparison"] = "fine_tuning.comparison"
    align: Literal["step", "kl"]
    sampled: bool
    """Whether a series was thinned to `limit` points, evenly, with its first and last."""
    data: list[ComparedJob]
    frontier: list[FrontierPoint]
    """By ascending KL; checkpoints without a reading come last."""
