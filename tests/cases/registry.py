"""The public cases (tests/cases/public_cases.json, each with its public sources) and who checks which.

A case is checked here, by a function registered under its id, or elsewhere, by tests named in ELSEWHERE. Where a case lets the
product choose, the runner's docstring says what was chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.grader import ProcessPool


@dataclass(frozen=True)
class Bench:
    """What a runner may use."""

    tmp_path: Path
    processes: ProcessPool
    monkeypatch: pytest.MonkeyPatch


Case = dict[str, Any]
Runner = Callable[[Case, Bench], None]

CASES: dict[str, Case] = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "public_cases.json").read_text(encoding="utf-8"))["cases"]
}
RUNNERS: dict[str, Runner] = {}


def runs(*case_ids: str) -> Callable[[Runner], Runner]:
    """Register a runner for cases."""

    def register(runner: Runner) -> Runner:
        for case_id in case_ids:
            assert case_id not in RUNNERS, f"{case_id} has two runners"
            RUNNERS[case_id] = runner
        return runner

    return register
