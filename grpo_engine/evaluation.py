"""The held-out file: one completion a prompt, graded by a grader of its own.

Sampled as in training, with random numbers keyed apart from training's and the same at every evaluation: a prompt meets the
same draws, so that a difference between two evaluations comes from the weights. Nothing here touches the run's state: not
the data cursor, not a global random generator, not beta.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from grpo_engine.batch import Completion, Prompt
from grpo_engine.contract.job import SamplingConfig
from grpo_engine.grader import GraderPool
from grpo_engine.grading import grade_completions
from grpo_engine.memory import Budget
from grpo_engine.policy import Policy
from grpo_engine.rollout import sample_groups


@dataclass
class Evaluation:
    """What one pass over the held-out prompts gave."""

    completions: list[Completion]
    errors: list[str] = field(default_factory=list)
    """Of the completions that could not be graded; they are left out of the mean."""

    @property
    def rewards(self) -> list[float]:
        """Rewards that are numbers."""
        return [completion.reward for completion in self.completions if math.isfinite(completion.reward)]

    @property
    def reward_mean(self) -> float | None:
        """Mean reward; None when nothing could be graded."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def to_json(self) -> dict[str, Any]:
        """Data of the `evaluation.completed` event. What has no value is absent."""
        rewards, count = self.rewards, len(self.completions)
        data: dict[str, Any] = {
            "num_prompts": count,
            "num_failed": count - len(rewards),
            "length_mean": math.fsum(len(completion.token_ids) for completion in self.completions) / count,
            "truncated_frac": sum(completion.is_truncated for completion in self.completions) / count,
        }
        if rewards:
            data["reward_mean"] = self.reward_mean
            data["reward_std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
            data["reward_se"] = data["reward_std"] / math.sqrt(len(rewards))
        if self.errors:
            data["errors"] = sorted(set(self.errors))[:5]
        return data


class Evaluator:
    """Held-out prompts and their grader."""

    def __init__(self, prompts: list[Prompt], grader: GraderPool, sampling: SamplingConfig, seed: int, every: int) -> None:
        assert prompts, "an evaluation has at least one prompt"
        self._prompts = prompts
        self._grader = grader
        self._sampling = sampling
        self._seed = evaluation_seed(seed)
        self._every = every

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the weights after `step` are evaluated."""
        return step % self._every == 0 or step == num_steps

    def run(self, policy: Policy, budget: Budget) -> Evaluation:
        """Sample and grade with the policy's present weights, in batches no larger than a training step's."""
        at_once = self._sampling.prompts_per_step * self._sampling.group_size
        completions: list[Completion] = []
        for start in range(0, len(self._prompts), at_once):
            groups = sample_groups(policy, self._prompts[start : start + at_once], 1, self._sampling, self._seed, 0, budget=budget)
            completions += [group.completions[0] for group in groups]
        rows = list(zip(self._prompts, completions, strict=True))
        return Evaluation(completions, grade_completions(rows, self._grader, policy.ranks))


def evaluation_seed(seed: int) -> int:
    """A seed that no training run can have: job seeds stay below 2**31."""
    return int.from_bytes(hashlib.sha256(f"evaluation {seed}".encode()).digest()[:8], "big") | 1 << 64
