"""One GRPO training step, top to bottom.

sample -> grade -> advantages -> reference log-probabilities -> for each update: forward, loss and backward in
micro-batches, check, clip, AdamW -> beta rule -> telemetry.

`kl/ref` is measured in the forward of the first update, before any weight changes: at step 1 it is exactly 0. `old` is the
detached log-probability of that same forward, never the sampler's. Sampling and grading are in collect.py, the updates
themselves in update.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from grpo_engine.advantage import Advantages, group_advantages
from grpo_engine.batch import Completion, Rollout
from grpo_engine.beta import BetaUpdate
from grpo_engine.collect import collect, timed
from grpo_engine.evaluation import Evaluation
from grpo_engine.learner import Learner
from grpo_engine.step_metrics import Metrics, StepTensors, describe_kl, group_metrics, rollout_metrics
from grpo_engine.update import optimize, prepare_update


@dataclass
class StepResult:
    """What a step did."""

    step: int
    metrics: Metrics
    beta_update: BetaUpdate
    rollout: Rollout
    advantages: Advantages | None = None
    """None in a step whose rewards were not all finite; then there was no update, and no tensors."""
    tensors: StepTensors | None = None
    quarantine: str | None = None
    """Why the update was not applied; None when it was."""
    grader_errors: list[str] = field(default_factory=list)
    shortcut_problem: str | None = None
    """Why the branched forward is not used; set in the first step only."""
    slow_sampling: list[str] = field(default_factory=list)
    """Why sampling takes a slower way; each reason in the first step after it was found."""
    kl_details: dict[str, Any] | None = None
    """KL by position, token and prompt, in the steps that ask for it."""
    evaluation: Evaluation | None = None
    """Of the held-out file with the weights after the step, when it was due."""
    reference_answers: list[Completion] | None = None
    """What the reference says to each completion's prompt, in the rollout's order; None in steps that do not ask."""


def train_step(learner: Learner, step: int) -> StepResult:
    """Run step `step` on the learner: its weights, optimizer, data cursor and beta move on."""
    seconds: dict[str, float] = {}
    beta, learning_rate = learner.rule.value(step), learner.learning_rate(step)
    with timed(seconds, "step"):
        collected = collect(learner, step, seconds)
        rollout = collected.rollout
        metrics = {**rollout_metrics(rollout), **collected.metrics, "beta/applied": beta, "optimizer/learning_rate": learning_rate}
        reward_PG = rollout.reward_PG()
        quarantine: str | None = None
        kl_details: dict[str, Any] | None = None
        advantages: Advantages | None = None
        tensors: StepTensors | None = None
        if bool(reward_PG.isinf().any()):
            quarantine = "a reward is not a finite number"
        elif bool(reward_PG.isnan().all()):
            quarantine = "no completion could be graded"
        else:
            advantages = group_advantages(reward_PG, learner.grpo.loss, rollout.is_truncated_PG())
            metrics |= group_metrics(advantages)
            with timed(seconds, "reference"):
                update = prepare_update(learner, rollout, advantages, beta)
            tensors = update.tensors
            with timed(seconds, "update"):
                should_split = is_due(learner.grpo.telemetry.gradient_split_every, step) and beta > 0
                quarantine = optimize(learner, update, learning_rate, metrics, should_split=should_split)
            if is_due(learner.grpo.telemetry.kl_details_every, step):
                kl_details = describe_kl(update.tensors, learner.grpo.kl, rollout)
        metrics = learner.ranks.first(lambda: metrics)
        beta_update = _update_beta(learner, rollout, step, metrics, is_clean=quarantine is None)
        metrics |= beta_update.metrics()
    metrics |= {f"time/{phase}_s": value for phase, value in seconds.items()}
    metrics["throughput/tokens_per_s"] = rollout.num_tokens / seconds["step"]
    result = StepResult(step, metrics, beta_update, rollout, advantages, tensors, quarantine)
    result.grader_errors, result.shortcut_problem = collected.grader_errors, collected.shortcut_problem
    result.slow_sampling = collected.slow_sampling
    result.kl_details = kl_details
    return result


def is_due(every: int | None, step: int) -> bool:
    """Whether something done every n steps is done at this one; null is never."""
    return every is not None and step % every == 0


def _update_beta(learner: Learner, rollout: Rollout, step: int, metrics: Metrics, *, is_clean: bool) -> BetaUpdate:
    """Feed the rule the estimator's own mean, unclipped and unweighted. A quarantined step reads NaN: beta holds."""
    if learner.reference is None:
        return learner.rule.update(step, None, None, len(rollout.rows))
    estimator = learner.grpo.kl.estimator
    token = metrics.get(f"kl/ref/{estimator}/mean", math.nan) if is_clean else math.nan
    sequence = metrics.get(f"kl_per_sequence/ref/{estimator}/mean", math.nan) if is_clean else math.nan
    return learner.rule.update(step, token, sequence, len(rollout.rows))
