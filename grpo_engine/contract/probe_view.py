"""What a probe found: a few rollouts of a job's own spec, and the update's work, without a change of any weight.

Everything is measured on the worker that answered, by the very code that trains.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from grpo_engine.contract.kl import Estimator
from grpo_engine.contract.view_base import JobWarning, Number, View


class ProbeSeconds(View):
    """Seconds of one step of the job, by phase."""

    sampling: float
    grading: float
    reference: float | None
    """The reference's forward; null when nothing was trained on, see `warnings`."""
    update: float | None
    """Forward, backward and optimizer of every update of the step; null as above."""
    step: float
    """The whole step."""
    load: float
    """Once, before the first step: reading the model, the reference and the data. A download is part of it."""


class ProbeMemory(View):
    """The most memory a step held."""

    kind: Literal["process", "cuda"]
    """`process`: main memory of the engine. `cuda`: what torch held on the GPU."""
    peak_bytes: int
    total_bytes: int | None
    """What the device has (or the container may use); null where it does not say."""


class ProbeKl(View):
    """KL to the reference at step 1, before any update, in nats per token: 0.0 when the job starts as its own reference."""

    estimator: Estimator
    """The job's own."""
    value: Number
    """By that estimator."""
    by_estimator: dict[str, Number]
    """By every estimator that is measured."""


class ProbeSample(View):
    """One completion of step 1."""

    row: int
    """Index of the prompt's row in the training file, from 0, unusable rows left out."""
    prompt: str
    """As fed to the model; cut after 2,000 characters, as is the completion."""
    completion: str
    reward: Number | None
    """null when it could not be graded; `warnings` says why."""
    is_truncated: bool
    """Hit the token limit without an end token."""


class Probe(View):
    """What the job's first step looks like, and what the whole job will cost."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "object": "fine_tuning.job.probe",
                    "worker": "trainer-1",
                    "device": "cpu",
                    "precision": "fp32",
                    "parameters": 134515008,
                    "trained_parameters": 134515008,
                    "context_length": 8192,
                    "num_steps": 100,
                    "groups_per_step": 4,
                    "groups_probed": 4,
                    "is_whole_step": True,
                    "seconds": {"sampling": 4.9, "grading": 0.01, "reference": 0.6, "update": 2.4, "step": 7.9, "load": 3.1},
                    "estimated_seconds": 793.1,
                    "memory": {"kind": "process", "peak_bytes": 3221225472, "total_bytes": 33554432000},
                    "kl": {"estimator": "k3", "value": 0.0, "by_estimator": {"k1": 0.0, "k2": 0.0, "k3": 0.0, "abs": 0.0}},
                    "reward_mean": 0.25,
                    "reward_std": 0.44,
                    "zero_variance_share": 0.5,
                    "truncated_share": 0.0,
                    "failed_share": 0.0,
                    "mean_completion_tokens": 21.5,
                    "longest_prompt_tokens": 48,
                    "prompts": 32,
                    "skipped_long_prompts": 0,
                    "samples": [{"row": 3, "prompt": "3+4=", "completion": " 7", "reward": 1.0, "is_truncated": False}],
                    "warnings": [],
                }
            ]
        }
    )

    object: Literal["fine_tuning.job.probe"] = "fine_tuning.job.probe"
    worker: str | None = None
    """The worker that answered."""
    device: str
    """`cpu`, or `cuda:0`."""
    precision: Literal["fp32", "bf16"]
    parameters: int
    """In memory."""
    trained_parameters: int
    context_length: int
    num_steps: int
    groups_per_step: int
    """Prompts of one step of the job."""
    groups_probed: int
    """Of the step all numbers below are about."""
    is_whole_step: bool
    """False when a whole step would not have ended in time: then seconds are scaled up from `groups_probed`, and memory, rewards and
    shares are those of these groups alone."""
    seconds: ProbeSeconds
    estimated_seconds: float
    """Of the whole job on this worker: loading, `num_steps` steps and its evaluations, at most `limits.max_seconds`. Waiting in the
    queue and writing checkpoints are not in it, and completions may grow longer or shorter in training."""
    memory: ProbeMemory
    kl: ProbeKl | None
    """null when the job holds no reference, or nothing was trained on."""
    reward_mean: Number | None
    """null when no completion could be graded."""
    reward_std: Number | None
    zero_variance_share: float | None
    """Share of groups whose rewards are all equal: they teach nothing. null when nothing could be graded."""
    truncated_share: float
    failed_share: float
    """Share of completions the grader gave no number for."""
    mean_completion_tokens: float
    longest_prompt_tokens: int
    prompts: int
    """Rows that fit the context."""
    skipped_long_prompts: int
    """Rows that do not, and are left out."""
    samples: list[ProbeSample]
    """A few completions of step 1; empty when the job redacts its rollouts."""
    warnings: list[JobWarning] = []
    """What would disappoint: codes `no_signal`, `all_truncated`, `grader_failed`, `step_quarantined`, `long_prompts`, `partial_probe`,
    `memory_tight`, `memory_reduced`, `slow_forward`, `slow_sampling`."""
