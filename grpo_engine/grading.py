"""Rewards into completions, for training and for held-out files alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_engine.batch import Completion, Prompt
from grpo_engine.grader import GraderPool, Sample
from grpo_engine.ranks import Ranks


def grade_completions(rows: Sequence[tuple[Prompt, Completion]], grader: GraderPool, ranks: Ranks) -> list[str]:
    """Put rewards into the completions; returns the errors of those that could not be graded (their reward is NaN).

    The first rank grades for all.
    """
    samples = [Sample(prompt.item, completion.text, {"num_tokens": len(completion.token_ids)}) for prompt, completion in rows]
    errors = []
    for (_, completion), score in zip(rows, ranks.first(lambda: grader.score(samples)), strict=True):
        completion.reward, completion.parts = score.value, score.parts
        if not math.isfinite(score.value):
            errors.append(score.error or f"the grader returned {score.value}")
    return errors
