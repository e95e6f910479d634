"""Graders: what a completion is worth. Torch-free; `make_grader(cfg).score(samples)` is the front door.

Cheap graders run in the calling thread, in linear time; the others in spawned processes with a deadline for each sample.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from grpo_engine.contract.environment import Environment
from grpo_engine.contract.grader import Grader
from grpo_engine.grader.check import check_grader, check_templates
from grpo_engine.grader.classifier import Classifier
from grpo_engine.grader.compiled import compile_grader, needs_process
from grpo_engine.grader.outside import Means, ModelPlaces, open_scorers, with_answers
from grpo_engine.grader.plugin import installed_plugins
from grpo_engine.grader.pool import DEFAULT_DEADLINE_S, DEFAULT_SIZE, ProcessPool
from grpo_engine.grader.sample import MAX_OUTPUT_CHARACTERS, Sample, Score, View

__all__ = [
    "GraderPool", "Means", "ModelPlaces", "ProcessPool", "Sample", "Score", "check_grader", "check_templates", "installed_plugins",
    "make_grader",
]  # fmt: skip


NO_MEANS = Means()


class GraderPool:
    """One grader, ready to score. Safe to call from several threads."""

    def __init__(
        self, cfg: Grader | Environment, pool: ProcessPool, *, owns_pool: bool, deadline_s: float, means: Means = NO_MEANS
    ) -> None:
        self._pool = pool
        self._owns_pool = owns_pool
        self._deadline_s = deadline_s
        self._config = cfg.model_dump_json()
        self._key = hashlib.sha256(self._config.encode()).hexdigest()
        self._scorers = {} if isinstance(cfg, Environment) else open_scorers(cfg, "grader", means)
        self._inline = None if isinstance(cfg, Environment) or needs_process(cfg) else compile_grader(cfg)

    def score(self, samples: Sequence[Sample | tuple[Mapping[str, Any], str, Mapping[str, Any]]]) -> list[Score]:
        """One score a sample, in order. A sample that cannot be graded has value NaN and says why in `error`; nothing is raised."""
        asked = [Sample(*sample) for sample in samples]
        scores: list[Score | None] = [_refused(sample) for sample in asked]
        open_indices = [index for index, score in enumerate(scores) if score is None]
        ready = with_answers(self._scorers, [asked[index] for index in open_indices])
        if self._inline is not None:
            answers = [self._inline(View(sample)) for sample in ready]
        else:
            answers = self._pool.grade(self._key, self._config, ready, self._deadline_s)
        for index, answer in zip(open_indices, answers, strict=True):
            scores[index] = answer
        return [score for score in scores if score is not None]

    def start(self) -> dict[str, str]:
        """Load the classifiers. SHA-256 of their weights, by their path in the grader. Raises InvalidRequest naming the field."""
        found = {path: scorer.start() for path, scorer in self._scorers.items()}
        return {path: sha256 for path, sha256 in found.items() if sha256 is not None}

    @property
    def has_classifier(self) -> bool:
        """Whether it loads models."""
        return any(isinstance(scorer, Classifier) for scorer in self._scorers.values())

    @property
    def pids(self) -> list[int]:
        """Grader processes that live now."""
        return self._pool.pids

    def close(self) -> None:
        """End the processes, unless they are shared."""
        for scorer in self._scorers.values():
            scorer.close()
        if self._owns_pool:
            self._pool.close()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def make_grader(
    cfg: Grader, *, processes: int = DEFAULT_SIZE, deadline_s: float = DEFAULT_DEADLINE_S, pool: ProcessPool | None = None,
    means: Means = NO_MEANS,
) -> GraderPool:  # fmt: skip
    """A grader ready to score. `pool` shares processes between graders; else `processes` of its own start when first needed.

    Raises InvalidRequest naming the field for a grader that cannot work.
    """
    check_grader(cfg, "grader", means=means)
    return GraderPool(cfg, pool or ProcessPool(processes), owns_pool=pool is None, deadline_s=deadline_s, means=means)


def _refused(sample: Sample) -> Score | None:
    if len(sample.output_text) > MAX_OUTPUT_CHARACTERS:
        return Score(math.nan, error=f"the completion is longer than {MAX_OUTPUT_CHARACTERS} characters", kind="raised")
    return None
