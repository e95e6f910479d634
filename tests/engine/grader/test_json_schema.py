"""JSON Schemas of jobs: patterns in linear time, and nothing that has no effect."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_engine.grader.schema import compile_schema
from grpo_engine.grader.shape import json_check
from tests.engine.grader.build import grader, score


def fits(schema: dict[str, Any], value: Any) -> bool:
    return compile_schema(schema)(value) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a|aa)+$"},
        {"type": "object", "patternProperties": {"^(a|aa)+$": {"type": "integer"}}, "additionalProperties": False},
    ],
)
def test_a_catastrophic_pattern_takes_linear_time(schema: dict[str, Any]) -> None:
    """https://github.com/huggingface/trl/issues/5415 in a schema."""
    text = "a" * 100_000
    bad, good = (text + "b", text) if schema["type"] == "string" else ({text + "b": 1}, {text: 1})
    assert not fits(schema, bad)
    assert fits(schema, good)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"$ref": "#/nope"}, "not in it"),
        ({"$ref": "#"}, "back to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "back to itself"),
        ({"$ref": "https://example.com/s.json"}, "inside the schema"),
        ({"type": "string", "format": "no-such-format"}, "not checked"),
        ({"type": "string", "pattern": "(?=a)"}, "RE2"),
        ({"properties": {"x": {"pattern": "("}}}, "is not a .regex"),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "additionalProperties"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(schema: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compile_schema(schema)


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string", "format": "ipv4"}, "1.2.3.4", True),
        ({"type": "string", "format": "ipv4"}, "1.2.3.400", False),
        ({"$defs": {"tree": {"properties": {"next": {"$ref": "#/$defs/tree"}}, "required": ["v"]}}, "$ref": "#/$defs/tree"},
         {"v": 1, "next": {"v": 2}}, True),
        ({"$defs": {"tree": {"properties": {"next": {"$ref": "#/$defs/tree"}}, "required": ["v"]}}, "$ref": "#/$defs/tree"},
         {"v": 1, "next": {}}, False),
        ({"properties": {"format": {"type": "string"}, "pattern": {"type": "string"}, "default": {"pattern": "^a"}}},
         {"format": "x", "pattern": "(", "default": "b"}, False),
        ({"default": {"format": "anything", "pattern": "("}}, 1, True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, {"a": "x", "b": 1}, True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, {"a": "x", "b": "y"}, False),
        ({"patternProperties": {"^n_": {"type": "integer"}}}, {"n_a": "x"}, False),
        ({"type": "string", "pattern": "^.$"}, "\ud800", True),
    ],
)  # fmt: skip
def test_verdicts(schema: dict[str, Any], value: Any, expected: bool) -> None:
    assert fits(schema, value) is expected


def test_a_fence_with_windows_line_ends() -> None:
    cfg = grader({"type": "json_schema", "allow_fence": True})
    assert json_check(cfg, lambda value: None, '```json\r\n{"a": 1}\r\n```')[0] == 1.0  # type: ignore[arg-type]


def test_half_of_a_surrogate_pair_is_no_fault() -> None:
    assert score({"type": "regex", "pattern": "x"}, "\ud800x").value == 1.0
    assert score({"type": "regex", "pattern": "x.?", "match": "full"}, "x\udc80").value == 1.0


def test_columns_in_any_script_are_reached() -> None:
    raw = {"type": "string_check", "operation": "eq", "reference": "{{item.\u7b54\u6848}}"}
    assert score(raw, "42", {"\u7b54\u6848": 42}).value == 1.0
