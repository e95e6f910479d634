"""What each cheap grader gives, by hand-worked examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.grader import ProcessPool, make_grader
from grpo_engine.grader.text import gleu, rouge_n
from tests.engine.grader.build import grader, score


@pytest.mark.parametrize(
    ("operation", "text", "reference", "expected"),
    [
        ("eq", "Paris", "Paris", 1),
        ("eq", "PARIS", "Paris", 0),
        ("eq", "Paris ", "Paris", 0),
        ("ne", "Paris", "Paris", 0),
        ("ne", "Rome", "Paris", 1),
        ("like", "It is Paris.", "Paris", 1),
        ("like", "It is paris.", "Paris", 0),
        ("ilike", "It is PARIS.", "paris", 1),
        ("ilike", "STRASSE", "straße", 1),
        ("ilike", "Rome", "paris", 0),
    ],
)
def test_string_check(operation: str, text: str, reference: str, expected: int) -> None:
    assert score({"type": "string_check", "operation": operation, "reference": reference}, text).value == expected


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({"pattern": "b.d"}, "abxdz", 1),
        ({"pattern": "b.d"}, "ab\ndz", 0),
        ({"pattern": "b.d", "flags": ["DOTALL"]}, "ab\ndz", 1),
        ({"pattern": "B.D", "flags": ["IGNORECASE"]}, "abxd", 1),
        ({"pattern": "^b$", "flags": ["MULTILINE"]}, "a\nb\nc", 1),
        ({"pattern": "^b$"}, "a\nb\nc", 0),
        ({"pattern": "b+", "match": "full"}, "bbb", 1),
        ({"pattern": "b+", "match": "full"}, "bbb\n", 0),
        ({"pattern": r"^\s*[0-9]+\s*$"}, " 42\n", 1),
        ({"pattern": "é{3}"}, "ééé", 1),
    ],
)
def test_regex(settings: dict[str, Any], text: str, expected: int) -> None:
    assert score({"type": "regex", **settings}, text).value == expected


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"(a)\1", "a{1001}", "[z-a]", "(?<!x)y"])
def test_a_pattern_re2_does_not_take_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="RE2") as caught:
        make_grader(grader({"type": "regex", "pattern": pattern}))
    assert caught.value.param == "grader.pattern"


def test_a_pattern_that_backtracks_for_ever_elsewhere_is_linear_here() -> None:
    assert score({"type": "regex", "pattern": "^(a|aa)+$"}, "a" * 100_000 + "b").value == 0
    assert score({"type": "regex", "pattern": "(a*)*(a*)*(a*)*b"}, "a" * 100_000).value == 0


@pytest.mark.parametrize(
    ("metric", "text", "reference", "expected"),
    [
        ("fuzzy_match", "abcd", "abcd", 1.0),
        ("fuzzy_match", "abc", "abd", 2 / 3),  # 1 - indel distance 2 / 6
        ("fuzzy_match", "", "abc", 0.0),
        ("rouge_1", "the cat sat", "the cat ran", 2 / 3),  # 2 of 3 words on both sides
        ("rouge_2", "the cat sat", "the cat ran", 1 / 2),  # 1 of 2 pairs on both sides
        ("rouge_5", "the cat sat", "the cat ran", 0.0),
        ("rouge_l", "a x b y c", "a b c", 6 / 8),  # common subsequence 3: 2 * 3 / (5 + 3)
        ("gleu", "the cat", "the cat sat", 3 / 6),  # 2 words + 1 pair of the reference's 3 + 2 + 1
    ],
)
def test_text_similarity(processes: ProcessPool, metric: str, text: str, reference: str, expected: float) -> None:
    answer = score({"type": "text_similarity", "reference": reference, "evaluation_metric": metric}, text, pool=processes)
    assert answer.value == pytest.approx(expected, abs=1e-12)


def test_text_similarity_with_a_threshold_is_one_or_zero(processes: ProcessPool) -> None:
    raw = {"type": "text_similarity", "reference": "abd", "pass_threshold": 0.6}
    assert score(raw, "abc", pool=processes).value == 1.0
    assert score({**raw, "pass_threshold": 0.7}, "abc", pool=processes).value == 0.0


WORDS = st.lists(st.sampled_from("abc"), max_size=12)


@given(WORDS, WORDS, st.integers(1, 5))
def test_similarities_are_shares_symmetric_and_one_for_equals(words: list[str], gold: list[str], n: int) -> None:
    for measure in (lambda a, b: rouge_n(a, b, n), gleu):
        assert 0.0 <= measure(words, gold) <= 1.0
        assert measure(words, gold) == measure(gold, words)
        assert measure(words, words) == float(bool(words) if measure is gleu else len(words) >= n)


@pytest.mark.parametrize(
    ("settings", "text", "extras", "expected", "counted"),
    [
        ({"unit": "characters", "target_max": 10}, "é" * 10, {}, 1.0, 10),
        ({"unit": "characters", "target_max": 10}, "é" * 11, {}, 0.0, 11),
        ({"unit": "words", "target_max": 2}, " two  words\n", {}, 1.0, 2),
        ({"unit": "tokens", "target_max": 10}, "whatever", {"num_tokens": 11}, 0.0, 11),
        ({"unit": "tokens", "target_max": 10}, "whatever", {"num_tokens": 10}, 1.0, 10),
        ({"unit": "tokens", "target_max": 10}, "", {"num_tokens": 0}, 0.0, 0),
        ({"unit": "tokens", "target_min": 0, "target_max": 10}, "", {"num_tokens": 0}, 1.0, 0),
        ({"unit": "tokens", "target_max": 100, "falloff": 50}, "", {"num_tokens": 110}, 0.8, 110),
        ({"unit": "tokens", "target_max": 100, "falloff": 50}, "", {"num_tokens": 151}, 0.0, 151),
        ({"unit": "tokens", "target_min": 10, "target_max": 100, "falloff": 10}, "", {"num_tokens": 5}, 0.5, 5),
    ],
)
def test_length(settings: dict[str, Any], text: str, extras: dict[str, int], expected: float, counted: int) -> None:
    answer = score({"type": "length", **settings}, text, **extras)
    assert answer.value == pytest.approx(expected)
    assert answer.detail == {"counted": counted, "unit": settings["unit"]}


def test_tokens_without_a_tokenizer_are_an_estimate_that_says_so() -> None:
    detail = score({"type": "length", "unit": "tokens", "target_max": 10}, "aaaaaaaaaa").detail
    assert (detail["counted"], detail["unit"], detail["is_estimate"]) == (3, "tokens", True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>9</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("x<think>a</think><answer>9</answer>", 0),
        ("<think>a</think>x<answer>9</answer>", 0),
        ("<think>a</think><answer>9</answer>x", 0),
        ("<think>a</think><answer>9</answer></answer>", 0),
        ("<think>a</think><answer>9</answer><answer>9</answer>", 0),
        ("<answer>9</answer><think>a</think>", 0),
        ("<think>a<answer>9</answer></think>", 0),
        ("<answer>9</answer>", 0),
        ("<think>a</think><answer>9", 0),
        ("</think>a<think><answer>9</answer>", 0),
        ("", 0),
    ],
)
def test_format(text: str, expected: int) -> None:
    assert score({"type": "format"}, text).value == expected


@pytest.mark.parametrize(
    ("text", "ngram", "expected"),
    [
        ("a b c d", 2, 0.0),
        ("a a a a", 1, -0.75),
        ("a b a b a b", 2, -0.6),  # ab ba ab ba ab: 2 different of 5
        ("A b a B", 2, -1 / 3),  # case does not matter: ab ba ab
        ("a", 2, 0.0),
        ("", 1, 0.0),
    ],
)
def test_repetition(text: str, ngram: int, expected: float) -> None:
    assert score({"type": "repetition", "ngram": ngram}, text).value == pytest.approx(expected)


def test_repetition_scales_with_its_penalty() -> None:
    assert score({"type": "repetition", "ngram": 1, "max_penalty": -2.0}, "a a a a").value == -1.5


SCHEMA = {
    "type": "object",
    "required": ["a"],
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "$defs": {"n": {"type": "integer", "minimum": 1}},
}


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({}, "[]", 1),
        ({}, '"text"', 1),
        ({}, "", 0),
        ({}, "NaN", 0),
        ({}, '{"a": Infinity}', 0),
        ({}, "[" * 100_000, 0),
        ({"require": "object"}, "[]", 0),
        ({"require": "array"}, "[]", 1),
        ({"require": "object"}, '```json\n{"a": 1}\n```', 0),
        ({"require": "object", "allow_fence": True}, '```json\n{"a": 1}\n```', 1),
        ({"require": "object", "allow_fence": True}, 'see:\n```json\n{"a": 1}\n```', 0),
        ({"json_schema": SCHEMA}, '{"a": 1}', 1),
        ({"json_schema": SCHEMA}, '{"a": 0}', 0),
        ({"json_schema": SCHEMA}, '{"a": true}', 0),
        ({"json_schema": SCHEMA}, "{}", 0),
    ],
)
def test_json_schema(processes: ProcessPool, settings: dict[str, Any], text: str, expected: int) -> None:
    answer = score({"type": "json_schema", **settings}, text, pool=processes)
    assert answer.error is None
    assert answer.value == expected
    assert ("fault" in answer.detail) == (expected == 0)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"$ref": "https://example.org/schema.json"}, "only references inside"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "only references inside"),
        ({"type": "objekt"}, "not a JSON Schema"),
    ],
)
def test_a_schema_that_reaches_outside_or_is_none_is_refused(schema: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        make_grader(grader({"type": "json_schema", "json_schema": schema}))
    assert caught.value.param == "grader.json_schema"


@pytest.mark.parametrize(
    ("settings", "text", "reference", "expected"),
    [
        ({}, "so about 3.5 in all", "3.5", 1),
        ({}, "it costs $1,200.", 1200, 1),
        ({}, "it fell to -3", "3", 0),
        ({}, "no number", "3", 0),
        ({"absolute_tolerance": 0.5}, "3.5", "3", 1),
        ({"absolute_tolerance": 0.4}, "3.5", "3", 0),
        ({"relative_tolerance": 0.25}, "-5", "-4", 1),
        ({"relative_tolerance": 0.2}, "-5", "-4", 0),
        ({"extract": "none"}, "3", "3", 1),
        ({"extract": "none"}, "it is 3", "3", 0),
        ({}, "<think>3</think>4", "3", 0),
    ],
)
def test_number(settings: dict[str, Any], text: str, reference: Any, expected: int) -> None:
    assert score({"type": "number", **settings}, text, {"reference_answer": reference}).value == expected


def test_a_reference_that_is_no_number_is_a_fault_not_a_zero() -> None:
    answer = score({"type": "number"}, "3", {"reference_answer": "three"})
    assert math.isnan(answer.value)
    assert answer.kind == "invalid_variable"
    assert "three" in (answer.error or "")


def test_a_format_that_names_a_tag_twice_could_never_hold_and_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        grader({"type": "format", "tags": ["answer", "answer"]})
