"""Graders that are asked for all samples at once, outside the function that grades one: a remote service, a classifier.

Their answers are fetched first and travel with each sample (`extras`), so that they compose in `multi` like any other grader, and
in grader processes too. A sample without an answer has a fault in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_engine.contract.classifier import ScoreModel
from grpo_engine.contract.grader import Grader, Multi, Remote, RemotePolicy
from grpo_engine.grader.sample import GraderFault, MissingField, Sample, Score, View
from grpo_engine.grader.wire import score_to_wire

EXTRA = "outside"


@dataclass(frozen=True)
class ModelPlaces:
    """Where classifiers are found: as base models are (grpo_engine/models.py)."""

    cache_dir: Path
    model_dir: Path | None
    """null: any local folder."""
    find: Callable[[str], Path | None] | None = None
    """Raises InvalidRequest for a name that may not be loaded; the folder, or None when only the loading process can tell."""


@dataclass(frozen=True)
class Means:
    """What graders that leave the process may use here."""

    remote: RemotePolicy | None = None
    """null: no remote grader may be called."""
    models: ModelPlaces | None = None
    """null: no classifier may be loaded."""


class Scorer(Protocol):
    """Scores batches; a sample that cannot be scored gets NaN and an error, and nothing is raised."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order."""

    def start(self) -> str | None:
        """Get ready. The SHA-256 of what scores, where it is known. Raises InvalidRequest naming the field."""

    def close(self) -> None:
        """Give everything back. Safe to call twice."""


def outside_graders(cfg: Grader, at: str) -> dict[str, Remote | ScoreModel]:
    """The graders of this kind by their path."""
    if isinstance(cfg, Multi):
        return {path: found for name, part in cfg.graders.items() for path, found in outside_graders(part, f"{at}.graders.{name}").items()}
    return {at: cfg} if isinstance(cfg, Remote | ScoreModel) else {}


def open_scorers(cfg: Grader, at: str, means: Means) -> dict[str, Scorer]:
    """A scorer for each. Raises InvalidRequest naming the field of one that cannot work here."""
    from grpo_engine.grader.classifier import Classifier
    from grpo_engine.grader.remote import RemoteService

    return {
        path: RemoteService(found, path, means) if isinstance(found, Remote) else Classifier(found, path, means)
        for path, found in outside_graders(cfg, at).items()
    }


def with_answers(scorers: Mapping[str, Scorer], samples: Sequence[Sample]) -> list[Sample]:
    """The samples with what the scorers said of each."""
    if not scorers or not samples:
        return list(samples)
    told = {path: scorer.score(samples) for path, scorer in scorers.items()}
    return [
        Sample(sample.item, sample.output_text, {**sample.extras, EXTRA: {path: score_to_wire(told[path][number]) for path in told}})
        for number, sample in enumerate(samples)
    ]


def answer_of(view: View, path: str) -> tuple[float, dict[str, Any]]:
    """What the scorer at a path said of a sample. Raises GraderFault."""
    told = view.extras.get(EXTRA, {}).get(path)
    if told is None:
        raise GraderFault("raised", "the grader was not asked")
    if told["kind"] == "invalid_variable":
        raise MissingField(told["error"])
    if told["error"] is not None:
        raise GraderFault(told["kind"], told["error"])
    return told["value"], told["detail"]


def fault(kind: Any, message: str) -> Score:
    """A sample that cannot be scored."""
    return Score(math.nan, error=message[:1000], kind=kind)


def check_outside(cfg: Grader, at: str, means: Means) -> None:
    """Raise InvalidRequest for one that cannot work here, without calling anything."""
    from grpo_engine.grader.classifier import check_classifier
    from grpo_engine.grader.remote import check_remote

    for path, found in outside_graders(cfg, at).items():
        if isinstance(found, Remote):
            check_remote(found, path, means.remote)
        else:
            check_classifier(found, path, means.models)
