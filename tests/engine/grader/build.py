"""Graders from the JSON a client would post."""

from __future__ import annotations

from typing import Any

from grpo_engine.contract.grader import Grader
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.grader import ProcessPool, Score, make_grader


def grader(raw: dict[str, Any]) -> Grader:
    """Validated as part of a job is."""
    found = validate(GrpoConfig, {"grader": raw}).grader
    assert found is not None
    return found


def score(raw: dict[str, Any], text: str, item: dict[str, Any] | None = None, pool: ProcessPool | None = None, **extras: Any) -> Score:
    """One sample's score through the front door."""
    with make_grader(grader(raw), pool=pool) as ready:
        (answer,) = ready.score([(item or {}, text, extras)])
    return answer
