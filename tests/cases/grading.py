"""Cases of kind d: rewards. Every vector is graded through the front door, firm or not: docs/graders.md states the rules of both."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo_engine.grader import Sample, Score, make_grader
from tests.cases.registry import CASES, Bench, Case, runs
from tests.engine.grader.build import grader


def raw_grader(case: Case) -> dict[str, Any]:
    """The case's words for a grader in the contract's spelling."""
    asked = case["input"]["grader"]
    if isinstance(asked, str):
        assert asked.startswith("math_equality")
        return {"type": "math"}
    match asked["kind"]:
        case "math_equality":
            return {"type": "math", "extract": asked.get("extract", "auto")}
        case "json_format":
            return {"type": "json_schema", "require": asked["require"], "allow_fence": True}
        case "length":
            return {"type": "length", "unit": asked["unit"], "target_max": asked["target_max"]}
        case "regex" if "(?!" in asked["pattern"]:
            return {"type": "format", "tags": ["think", "answer"]}
        case "regex":
            return {"type": "regex", "pattern": asked["pattern"], "flags": asked.get("flags", [])}
    raise AssertionError(f"no counterpart for {asked}")


def grade(case: Case, bench: Bench) -> list[Score]:
    vectors = case["input"]["vectors"]
    with make_grader(grader(raw_grader(case)), pool=bench.processes) as ready:
        return ready.score([Sample({"reference_answer": vector["answer"]}, vector["completion"]) for vector in vectors])


def check_verdicts(case: Case, scores: list[Score]) -> None:
    for vector, score in zip(case["input"]["vectors"], scores, strict=True):
        assert score.error is None, (vector, score)
        assert score.value == vector["verdict"], (vector, score)


@runs(*(case_id for case_id, case in CASES.items() if case["kind"] == "d" and case_id not in ("D26", "D28", "D32")))
def verdicts_of_all_vectors(case: Case, bench: Bench) -> None:
    """D25: RE2 has no lookaround, so the tag pattern is written as the grader `format`. D30: one fence around the JSON is allowed here,
    text around it never is."""
    check_verdicts(case, grade(case, bench))


@runs("D26")
def a_linear_engine(case: Case, bench: Bench) -> None:
    """RE2 answers both vectors, the catastrophic one included; no deadline is needed."""
    check_verdicts(case, grade(case, bench))
    with make_grader(grader(raw_grader(case))) as ready:
        (answer,) = ready.score([Sample({}, "a" * 200_000 + "b")])
    assert answer.value == 0.0


@runs("D28")
def the_same_verdict_from_any_thread(case: Case, bench: Bench) -> None:
    """16 callers at once get what one caller gets: math runs in the main thread of its own process."""
    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(lambda _: grade(case, bench), range(16)))
    for scores in answers:
        check_verdicts(case, scores)


@runs("D32")
def the_unit_is_said(case: Case, bench: Bench) -> None:
    """Without a tokenizer tokens are estimated and the answer says so; in training the engine passes their number."""
    for score in grade(case, bench):
        assert math.isfinite(score.value)
        assert score.detail["unit"] == "tokens"
        assert score.detail["is_estimate"] is True
    check_verdicts(case, grade(case, bench))
