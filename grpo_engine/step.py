"""One GRPO training step, top to bottom.

sample -> grade -> advantages -> reference log-probabilities -> for each update: forward, loss and backward in
micro-batches, check, clip, AdamW -> beta rule -> telemetry.

`kl/ref` is measured in the forward of the first update, before any weight changes: at step 1 it is exactly 0. `old` is the
detached log-probability of that same forward, never the sampler's. The updates themselves are in update.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_engine.advantage import group_advantages
from grpo_engine.batch import Rollout
from grpo_engine.beta import BetaUpdate
from grpo_engine.grader import Sample
from grpo_engine.learner import Learner
from grpo_engine.logprob import check_shortcut
from grpo_engine.rollout import sample_groups
from grpo_engine.step_metrics import Metrics, describe_kl, group_metrics, rollout_metrics
from grpo_engine.update import optimize, prepare_update


@dataclass
class StepResult:
    """What a step did."""

    step: int
    metrics: Metrics
    beta_update: BetaUpdate
    quarantine: str | None = None
    """Why the update was not applied; None when it was."""
    grader_errors: list[str] = field(default_factory=list)
    shortcut_problem: str | None = None
    """Why a fast path is not used; set in the first step only."""
    kl_details: dict[str, Any] | None = None
    """KL by position, token and prompt, in the steps that ask for it."""


def train_step(learner: Learner, step: int) -> StepResult:
    """Run step `step` on the learner: its weights, optimizer, data cursor and beta move on."""
    seconds: dict[str, float] = {}
    beta, learning_rate = learner.rule.value(step), learner.learning_rate(step)
    with _timed(seconds, "step"):
        with _timed(seconds, "sample"):
            rollout, shortcut_problem = _sample(learner, step)
        with _timed(seconds, "grade"):
            grader_errors = _grade(learner, rollout)
        metrics = {**rollout_metrics(rollout), "beta/applied": beta, "optimizer/learning_rate": learning_rate}
        reward_PG = rollout.reward_PG()
        quarantine: str | None = None
        kl_details: dict[str, Any] | None = None
        if not bool(torch.isfinite(reward_PG).all()):
            quarantine = "a reward is not a finite number"
        else:
            advantages = group_advantages(reward_PG, learner.grpo.loss, rollout.is_truncated_PG())
            metrics |= group_metrics(advantages)
            with _timed(seconds, "reference"):
                update = prepare_update(learner, rollout, advantages, beta)
            with _timed(seconds, "update"):
                should_split = is_due(learner.grpo.telemetry.gradient_split_every, step) and beta > 0
                quarantine = optimize(learner, update, learning_rate, metrics, should_split=should_split)
            if is_due(learner.grpo.telemetry.kl_details_every, step):
                kl_details = describe_kl(update.tensors, learner.grpo.kl, rollout)
        beta_update = _update_beta(learner, rollout, step, metrics, is_clean=quarantine is None)
        metrics |= beta_update.metrics()
    metrics |= {f"time/{phase}_s": value for phase, value in seconds.items()}
    metrics["throughput/tokens_per_s"] = rollout.num_tokens / seconds["step"]
    return StepResult(step, metrics, beta_update, quarantine, grader_errors, shortcut_problem, kl_details)


def is_due(every: int | None, step: int) -> bool:
    """Whether something done every n steps is done at this one; null is never."""
    return every is not None and step % every == 0


def _sample(learner: Learner, step: int) -> tuple[Rollout, str | None]:
    """The step's rollout. Step 1 also checks the fast forward against the plain one, and samples anew when they differ."""
    sampling, policy = learner.grpo.sampling, learner.policy
    prompts = learner.dataset.take(sampling.prompts_per_step)
    rollout = Rollout(step, sample_groups(policy, prompts, sampling.group_size, sampling, learner.seed, step))
    if step != 1:
        return rollout, None
    check = check_shortcut(policy.network, rollout.rows, temperature=sampling.temperature, pad_id=policy.pad_id)
    if check.is_equal:
        return rollout, None
    if policy.network.is_branched:
        learner.disable_branching(check.reason)
        rollout = Rollout(step, sample_groups(policy, prompts, sampling.group_size, sampling, learner.seed, step))
    return rollout, check.reason


def _grade(learner: Learner, rollout: Rollout) -> list[str]:
    """Put rewards into the completions; returns the errors of those that could not be graded (their reward is NaN)."""
    samples = [Sample(prompt.item, completion.text, {"num_tokens": len(completion.token_ids)}) for prompt, completion in rollout.rows]
    errors = []
    for (_, completion), score in zip(rollout.rows, learner.grader.score(samples), strict=True):
        completion.reward, completion.parts = score.value, score.parts
        if not math.isfinite(score.value):
            errors.append(score.error or f"the grader returned {score.value}")
    return errors


def _update_beta(learner: Learner, rollout: Rollout, step: int, metrics: Metrics, *, is_clean: bool) -> BetaUpdate:
    """Feed the rule the estimator's own mean, unclipped and unweighted. A quarantined step reads NaN: beta holds."""
    if learner.reference is None:
        return learner.rule.update(step, None, None, len(rollout.rows))
    estimator = learner.grpo.kl.estimator
    token = metrics.get(f"kl/ref/{estimator}/mean", math.nan) if is_clean else math.nan
    sequence = metrics.get(f"kl_per_sequence/ref/{estimator}/mean", math.nan) if is_clean else math.nan
    return learner.rule.update(step, token, sequence, len(rollout.rows))


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
