"""Graders from the JSON a client would post."""

from __future__ import annotations

import json
from typing import Any

from grpo_engine import reward_model
from grpo_engine.contract.grader import Grader
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.grader import ProcessPool, Score, make_grader
from grpo_engine.grader.wire import encode


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


class Here:
    """In place of `classifier.GraderProcess`: what the classifier's process does, in this one, which has torch already."""

    def __init__(self, *, module: str) -> None:
        assert module == reward_model.__name__
        self._server = reward_model.Server()

    def ask(self, line: bytes, deadline_s: float) -> bytes:
        return encode(self._server.serve(json.loads(line)))

    def kill(self) -> None:
        """Nothing to end."""
