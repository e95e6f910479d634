"""Rewards into completions, for training and for held-out files alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_engine.batch import Completion, Prompt
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.grader import GraderPool, Sample
from grpo_engine.outcome import ConfigError
from grpo_engine.ranks import Ranks

TRAINING, HELD_OUT = "method.grpo.grader", "method.grpo.evaluation.grader"


def start_graders(grader: GraderPool, gold: GraderPool, ranks: Ranks) -> dict[str, str]:
    """Have the first rank, which grades for all, load the classifiers. SHA-256 of each by its path in the spec.

    Raises ConfigError, on every rank.
    """
    pools = {TRAINING: grader} if gold is grader else {TRAINING: grader, HELD_OUT: gold}

    def start() -> dict[str, str] | tuple[str, str]:
        found: dict[str, str] = {}
        for place, pool in pools.items():
            try:
                found |= {f"{place}{path.removeprefix('grader')}": sha256 for path, sha256 in pool.start().items()}
            except InvalidRequest as error:
                return error.message, f"{place}{(error.param or '').removeprefix('grader')}"
        return found

    started = ranks.first(start)
    if isinstance(started, tuple):
        raise ConfigError(started[0], param=started[1])
    return started


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
