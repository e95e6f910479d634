"""What the reference answers to the prompts of a step: kept beside the completions, never trained on.

The answer to a completion is drawn with that completion's own random numbers, so that where the two texts part is where the
policy has come to choose otherwise; equal weights give equal texts. Sampling is keyed (rollout.py), so that nothing here touches
the run's state: not the data cursor, not a random generator, not the weights.
Left out: grades of these answers; a grader may cost money, and it would see texts that nobody trains on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from grpo_engine.adapter import BaseNetwork, switched_off
from grpo_engine.batch import Completion, Rollout
from grpo_engine.learner import Learner
from grpo_engine.policy import Policy
from grpo_engine.reference import Reference
from grpo_engine.rollout import sample_groups
from grpo_engine.step import StepResult, is_due


def add_reference_answers(learner: Learner, result: StepResult) -> None:
    """Fill `result.reference_answers` and the time it took, when the step asks for them. Every rank takes part.

    Call it before the reference moves: the answers are those of the reference the step's KL was measured against.
    """
    cfg = learner.grpo.telemetry
    if not (is_due(cfg.rollouts_every, result.step) and is_due(cfg.rollouts_reference_every, result.step)):
        return
    assert learner.reference is not None, "the contract refuses this setting for a job without a reference"
    started = time.perf_counter()
    with _as_policy(learner.policy, learner.reference) as policy:
        result.reference_answers = _answers(learner, policy, result.rollout)
    result.metrics["time/reference_answers_s"] = time.perf_counter() - started


def _answers(learner: Learner, policy: Policy, rollout: Rollout) -> list[Completion]:
    """One answer for each completion, in the order of the rollout. Groups are drawn as they were: those of one draw together."""
    sampling, groups = learner.grpo.sampling, rollout.groups
    found: dict[int, list[Completion]] = {}
    for first in sorted({group.first_completion for group in groups}):
        places = [place for place, group in enumerate(groups) if group.first_completion == first]
        drawn = sample_groups(
            policy,
            [groups[place].prompt for place in places],
            sampling.group_size,
            sampling,
            learner.seed,
            rollout.step,
            first_completion=first,
            budget=learner.sampling_memory,
        )
        found |= {place: group.completions for place, group in zip(places, drawn, strict=True)}
    return [completion for place in range(len(groups)) for completion in found[place]]


@contextmanager
def _as_policy(policy: Policy, reference: Reference) -> Iterator[Policy]:
    """The policy with the reference's weights, for sampling only: its own module without the adapter, or the reference's module."""
    if isinstance(reference.network, BaseNetwork):
        with switched_off(policy.model):
            yield policy
    else:
        yield replace(policy, network=reference.network)
