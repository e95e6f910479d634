"""One step's completions: sampled, graded and, with dynamic sampling, sampled again where a group has nothing to teach.

Dynamic sampling (DAPO, section 3.2): a group whose rewards are all equal has advantage 0, so fresh prompts take its place,
for a bounded number of rounds; what is missing then is filled with the latest equal groups. Which prompts are drawn depends
on seed, cursor and weights alone, so that a resumed run draws the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function

from grpo_engine.advantage import is_equal
from grpo_engine.batch import Group, Prompt, Rollout
from grpo_engine.grading import grade_completions
from grpo_engine.learner import Learner
from grpo_engine.logprob import check_shortcut
from grpo_engine.rollout import sample_groups
from grpo_engine.step_metrics import Metrics

Seconds = dict[str, float]


@dataclass
class Collected:
    """The completions a step trains on, and how they came about."""

    rollout: Rollout
    grader_errors: list[str]
    """Of every completion sampled, used or not."""
    shortcut_problem: str | None = None
    """Why the branched forward is not used; set in the first step only."""
    slow_sampling: list[str] = field(default_factory=list)
    """Why sampling takes a slower way than the model's shape allows; each reason in the first step after it was found."""
    metrics: Metrics = field(default_factory=dict)
    """Of dynamic sampling; empty without."""


def collect(learner: Learner, step: int, seconds: Seconds) -> Collected:
    """Sample and grade; the cursor moves on by what was drawn. `seconds` gets the time of each phase."""
    with timed(seconds, "sample"):
        rollout, shortcut_problem = _sample(learner, step)
    with timed(seconds, "grade"):
        errors = grade(learner, rollout)
    untold = learner.policy.network.untold
    collected = Collected(rollout, errors, shortcut_problem, untold.copy())
    untold.clear()
    if learner.grpo.loss.dynamic_sampling:
        _replace_equal_groups(learner, collected, seconds)
    return collected


def grade(learner: Learner, rollout: Rollout) -> list[str]:
    """Grade a rollout with the job's grader; see `grade_completions`."""
    return grade_completions(rollout.rows, learner.grader, learner.ranks)


def _sample(learner: Learner, step: int) -> tuple[Rollout, str | None]:
    """The step's rollout. Step 1 also checks the fast forward against the plain one, and samples anew when they differ."""
    sampling, policy = learner.grpo.sampling, learner.policy
    prompts = learner.dataset.take(sampling.prompts_per_step)
    rollout = Rollout(step, _groups(learner, prompts, step))
    if step != 1:
        return rollout, None
    found = check_shortcut(policy.network, rollout.rows, temperature=sampling.temperature, pad_id=policy.pad_id)
    check = learner.ranks.first(lambda: found)
    if check.is_equal:
        return rollout, None
    if policy.network.is_branched:
        learner.disable_branching(check.reason)
        rollout = Rollout(step, _groups(learner, prompts, step))
    return rollout, check.reason


def _groups(learner: Learner, prompts: list[Prompt], step: int, first_completion: int = 0) -> list[Group]:
    """A group of completions for each prompt, from the run's present weights."""
    sampling = learner.grpo.sampling
    return sample_groups(
        learner.policy,
        prompts,
        sampling.group_size,
        sampling,
        learner.seed,
        step,
        first_completion=first_completion,
        budget=learner.sampling_memory,
    )


def _replace_equal_groups(learner: Learner, collected: Collected, seconds: Seconds) -> None:
    """Draw fresh prompts in the place of equal groups until the step is full, or the rounds are used up.

    A group with fewer than two grades has nothing to compare and is replaced as well.
    """
    sampling, step = learner.grpo.sampling, collected.rollout.step
    wanted = len(collected.rollout.groups)
    drawn, num_rounds = list(collected.rollout.groups), 0
    kept, equal = _split(collected.rollout)
    while len(kept) < wanted and num_rounds < learner.grpo.loss.dynamic_sampling_rounds:
        num_rounds += 1
        with timed(seconds, "sample"):
            prompts = learner.dataset.take(wanted - len(kept))
            groups = _groups(learner, prompts, step, num_rounds * sampling.group_size)
        fresh = Rollout(step, groups)
        with timed(seconds, "grade"):
            collected.grader_errors += grade(learner, fresh)
        varied, more = _split(fresh)
        kept, equal, drawn = kept + varied, equal + more, drawn + groups
    missing = wanted - len(kept)
    collected.rollout = Rollout(step, kept + (equal[-missing:] if missing else []))
    rewards = [completion.reward for group in drawn for completion in group.completions if math.isfinite(completion.reward)]
    collected.metrics = {"groups/resampled": float(len(drawn) - wanted), "groups/resample_rounds": float(num_rounds)}
    if rewards:
        collected.metrics["reward/sampled_mean"] = math.fsum(rewards) / len(rewards)


def _split(rollout: Rollout) -> tuple[list[Group], list[Group]]:
    """Groups whose grades differ, and groups whose grades are equal or missing."""
    flags: list[bool] = is_equal(rollout.reward_PG()).tolist()
    pairs = list(zip(rollout.groups, flags, strict=True))
    return [group for group, equal in pairs if not equal], [group for group, equal in pairs if equal]


@contextmanager
def timed(seconds: Seconds, phase: str) -> Iterator[None]:
    """Add the time the block takes to `seconds[phase]`. In a trace of torch.profiler the block stands as `phase/<phase>`."""
    started = time.perf_counter()
    with record_function(f"phase/{phase}"):
        yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started
