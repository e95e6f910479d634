"""A job's first step, done for its numbers alone: the code that trains, with an optimizer that moves nothing.

A small step comes first, to warm up and to learn whether the whole one ends in time. The whole step 1 follows: its KL, rewards
and lengths are those of the job's own step 1, bit for bit on the same machine. A short step is done once more as step 2, because
step 1 also checks the fast forward, which no later step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from grpo_engine.learner import Learner
from grpo_engine.optimizer import Optimizer
from grpo_engine.step import StepResult, train_step

FEW_GROUPS = 2
SETTLE_S = 10.0
"""A whole step that took longer is not done twice: what step 1 does besides is small beside it."""

PHASES = ("sample", "grade", "reference", "update", "step")


class RestingOptimizer(Optimizer):
    """All the work of an update and all its memory, at learning rate 0: gradients, clipping and moments, and no weight changes."""

    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Clip, feed the moments, and leave the weights as they are."""
        super().step(0.0, grad_norm)


@dataclass(frozen=True)
class Rehearsal:
    """What was seen of the step."""

    first: StepResult
    """Step 1: of all its groups, or of a few."""
    groups: int
    """How many groups it had."""
    is_whole: bool
    seconds: dict[str, float]
    """By phase, of a whole step; scaled up when only a few groups were done."""
    notes: dict[str, str]
    """What the run would say in events, by code: `memory_reduced`, `slow_forward`, `slow_sampling`."""


def rehearse(learner: Learner, deadline: float, *, clock: Callable[[], float] = time.monotonic) -> Rehearsal:
    """Do step 1 without a consequence: weights, data cursor and beta are afterwards what they were.

    The whole step is done when it is expected to end before `deadline` (of `clock`). Raises what a step raises.
    """
    resting = RestingOptimizer(learner.policy.masters, learner.grpo.optimizer, learner.policy.sharding)
    learner.optimizer, before = resting, learner.optimizer
    whole = learner.grpo.sampling.prompts_per_step
    few = min(whole, FEW_GROUPS)
    try:
        result = _step(learner, 1, few)
        notes = _notes(learner, result)
        seconds, groups = _seconds(result, whole / few), few
        if few < whole and clock() + seconds["step"] <= deadline:
            result = _step(learner, 1, whole)
            notes = {**_notes(learner, result), **notes}
            seconds, groups = _seconds(result), whole
        if groups == whole and seconds["step"] <= min(SETTLE_S, deadline - clock()):
            seconds = _seconds(_step(learner, 2, whole))
    finally:
        learner.optimizer = before
    return Rehearsal(result, groups, groups == whole, seconds, notes)


def _step(learner: Learner, step: int, groups: int) -> StepResult:
    """One step of so many groups, from the run's present state, which is restored."""
    grpo, cursor, rule = learner.grpo, learner.dataset.cursor(), learner.rule.state()
    learner.grpo = grpo.model_copy(update={"sampling": grpo.sampling.model_copy(update={"prompts_per_step": groups})})
    try:
        return train_step(learner, step)
    finally:
        learner.grpo = grpo
        learner.dataset.seek(cursor)
        learner.rule.load(rule)


def _seconds(result: StepResult, factor: float = 1.0) -> dict[str, float]:
    return {phase: value * factor for phase in PHASES if (value := result.metrics.get(f"time/{phase}_s")) is not None}


def _notes(learner: Learner, result: StepResult) -> dict[str, str]:
    notes = {}
    news = [told for budget in (learner.memory, learner.sampling_memory) if (told := budget.take_news()) is not None]
    if news:
        notes["memory_reduced"] = "; ".join(news)
    if result.shortcut_problem is not None:
        notes["slow_forward"] = f"prompts are computed once per completion: {result.shortcut_problem}"
    if result.slow_sampling:
        notes["slow_sampling"] = f"sampling takes a slower way: {'; '.join(result.slow_sampling)}"
    return notes
