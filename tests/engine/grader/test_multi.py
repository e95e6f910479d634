"""Graders combined by weights or by OpenAI's formula."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.contract.error import InvalidRequest, NotImplementedYet
from grpo_engine.grader import check_grader, make_grader
from grpo_engine.grader.formula import parse_formula
from grpo_engine.grader.sample import GraderFault
from tests.engine.grader.build import grader, score

EXACT = {"type": "string_check", "reference": "{{item.gold}}"}
BARE = {"type": "regex", "pattern": r"^\d+$"}


def multi(**settings: Any) -> dict[str, Any]:
    return {"type": "multi", "graders": {"exact": EXACT, "bare": BARE}, **settings}


def test_weights_add_up_and_every_part_is_told() -> None:
    raw = multi(weights={"exact": 0.7, "bare": 0.3})
    answers = [score(raw, text, {"gold": "71"}) for text in ("71", "70", "x")]
    assert [answer.value for answer in answers] == [pytest.approx(1.0), 0.3, 0.0]
    assert answers[1].parts == {"exact": 0.0, "bare": 1.0}


def test_a_formula_combines_parts() -> None:
    assert score(multi(calculate_output="0.5 * exact + 0.5 * bare"), "70", {"gold": "71"}).value == 0.5
    assert score(multi(calculate_output="max(exact, bare / 2) - 0.1"), "70", {"gold": "71"}).value == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("formula", "sentence"),
    [
        ("exact + nope", "'nope'"),
        ("__import__('os').system('x')", "not arithmetic"),
        ("exact.__class__", "not arithmetic"),
        ("eval(exact)", "'eval'"),
        ("exact +", "the end"),
        ("(exact", "missing"),
        ("exact bare", "not expected"),
        ("1e", "not expected"),
        ("min()", "')'"),
        ("abs(1, 2)", "arguments"),
        ("(" * 60 + "1" + ")" * 60, "nested"),
        ("-" * 100 + "1", "nested"),
    ],
)
def test_anything_but_arithmetic_over_the_names_is_refused(formula: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match="calculate_output") as caught:
        make_grader(grader(multi(calculate_output=formula)))
    assert sentence in caught.value.message
    assert caught.value.param == "grader.calculate_output"


@pytest.mark.parametrize("formula", ["1 / exact", "log(exact)", "(exact - 1) ^ 0.5", "9 ^ 9 ^ 9", "exp(1000)", "10 ^ 7"])
def test_arithmetic_without_a_sane_result_is_a_fault_not_a_number(formula: str) -> None:
    answer = score(multi(calculate_output=formula), "x", {"gold": "71"})
    assert math.isnan(answer.value)
    assert answer.kind in ("formula", "not_a_number")
    assert answer.parts == {"exact": 0.0, "bare": 0.0}


NUMBERS = st.floats(-100, 100).map(lambda number: round(number, 3))


@given(
    NUMBERS,
    NUMBERS,
    st.sampled_from(["a + b * 2 - 3", "-a ^ 2 + b", "(a - b) * (a + b)", "2 ** -1 * a", "min(a, b, 0) - max(a, b)", "abs(a) - - b"]),
)
def test_formulas_mean_what_python_means(a: float, b: float, formula: str) -> None:
    expected = eval(formula.replace("^", "**"), {"min": min, "max": max, "abs": abs}, {"a": a, "b": b})
    assert parse_formula(formula, {"a", "b"})({"a": a, "b": b}) == pytest.approx(expected)


@given(st.text(alphabet="ab()+-*/^., 019e", max_size=30))
def test_no_formula_text_does_anything_but_parse_or_be_refused(formula: str) -> None:
    try:
        evaluate = parse_formula(formula, {"a", "b"})
    except ValueError:
        return
    with contextlib.suppress(GraderFault):
        assert isinstance(evaluate({"a": 0.5, "b": 2.0}), float)


SKIP = {
    "type": "multi",
    "graders": {
        "math": {"type": "string_check", "reference": "{{item.math_answer}}", "if_missing": "skip"},
        "word": {"type": "string_check", "reference": "{{item.keyword}}", "operation": "like", "if_missing": "skip"},
    },
    "weights": {"math": 0.5, "word": 0.25},
}


def test_a_part_that_does_not_apply_is_absent_and_adds_nothing() -> None:
    first = score(SKIP, "4", {"math_answer": 4})
    assert (first.value, first.parts) == (0.5, {"math": 1.0})
    second = score(SKIP, "a rose", {"keyword": "rose", "math_answer": None})
    assert (second.value, second.parts) == (0.25, {"word": 1.0})
    assert "skipped" in second.detail["math"]


def test_a_row_to_which_nothing_applies_is_a_fault() -> None:
    answer = score(SKIP, "4", {"other": 1})
    assert math.isnan(answer.value)
    assert answer.kind == "invalid_variable"


def test_in_a_formula_a_part_that_does_not_apply_counts_zero() -> None:
    raw = {key: value for key, value in SKIP.items() if key != "weights"}
    assert score({**raw, "calculate_output": "max(math, word) + 1"}, "4", {"math_answer": "4"}).value == 2.0


def test_skipping_outside_a_multi_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="only inside 'multi'"):
        make_grader(grader({**EXACT, "if_missing": "skip"}))


def test_a_failing_part_fails_the_whole_and_is_named() -> None:
    answer = score(multi(weights={"exact": 1.0, "bare": 1.0}), "1", {})
    assert math.isnan(answer.value)
    assert (answer.error or "").startswith("grader exact: ")


def test_nested_parts_have_dotted_names() -> None:
    inner = multi(weights={"exact": 1.0, "bare": 1.0})
    answer = score({"type": "multi", "graders": {"in": inner, "b": BARE}, "weights": {"in": 0.5, "b": 0.5}}, "71", {"gold": "71"})
    assert answer.parts == {"in": 2.0, "in.exact": 1.0, "in.bare": 1.0, "b": 1.0}
    assert answer.value == 1.5


@pytest.mark.parametrize(
    ("raw", "param", "word"),
    [
        ({"type": "python", "source": "def grade(sample, item): return 1.0"}, "g.type", "never"),
        ({"type": "score_model", "model": "judge", "input": [{"role": "user", "content": "rate"}], "range": [0, 1]}, "g.range", "clip"),
        ({"type": "label_model", "model": "judge", "input": [], "labels": ["a"], "passing_labels": ["a"]}, "g.type", "plug-in"),
        ({"type": "text_similarity", "reference": "x", "evaluation_metric": "cosine"}, "g.evaluation_metric", "fuzzy_match"),
    ],
)
def test_what_is_described_and_not_carried_out_is_refused_by_name(raw: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(NotImplementedYet) as caught:
        check_grader(grader(raw), "g")
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, "not_implemented", 422)
    assert word in caught.value.message
    with pytest.raises(NotImplementedYet) as inside:
        check_grader(grader({"type": "multi", "graders": {"a": BARE, "b": raw}, "weights": {"a": 1.0, "b": 1.0}}), "g")
    assert inside.value.param == param.replace("g.", "g.graders.b.")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weights": {"exact": 1.0}}, "exactly the graders"),
        ({"weights": {"exact": 1.0, "bare": 1.0}, "calculate_output": "exact"}, "exactly one of"),
        ({}, "exactly one of"),
        ({"weights": {"exact": 1.0, "bare": "2"}}, "number"),
        ({"graders": {}, "weights": {}}, "at least 1"),
        ({"weights": {"exact": 1.0, "bare": 1.0}, "wieght": 1}, "unknown key"),
    ],
)
def test_a_multi_that_contradicts_itself_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        grader({"type": "multi", "graders": {"exact": EXACT, "bare": BARE}, **change})
