"""From JSON to a spec: whatever is sent, the answer is a spec or an error that names a field of what was sent."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.contract.error import GrpoError, InvalidRequest
from grpo_engine.contract.intake import resolve_spec

EXAMPLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "examples" / "arithmetic.json").read_bytes())
GRADER = {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"}


def grpo(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "training_file": "file-1", "method": {"type": "grpo", "grpo": {"grader": GRADER, **changes}}}


ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("an unknown key deep down", grpo(sampling={"groupsize": 4}), "method.grpo.sampling.groupsize", "group_size"),
    ("a wrong tag", grpo(beta={"rule": "adaptive"}), "method.grpo.beta", "deadband"),
    ("no tag", grpo(grader={"pattern": "a"}), "method.grpo.grader", "type"),
    ("a key of another rule", grpo(beta={"rule": "fixed", "value": 0.1, "target": 0.1}), "method.grpo.beta.target", "unknown key"),
    ("value and schedule", grpo(beta={"rule": "deadband", "target": 0.1}), "method.grpo.beta", "value and schedule"),
    ("two names for beta", grpo(beta=0.1, kl_coef=0.1), "method.grpo", "given twice"),
    ("inside a multi", grpo(grader={"type": "multi", "graders": {"a": {"type": "regex"}}, "weights": {"a": 1.0}}),
     "method.grpo.grader.graders.a.pattern", "required"),
    ("a list element", grpo(optimizer={"betas": [0.9, 1.5]}), "method.grpo.optimizer.betas[1]", "less than 1"),
    ("a null method", {"model": "m", "training_file": "file-1", "method": None}, "method", "object"),
    ("a text as method", {"model": "m", "training_file": "file-1", "method": "grpo"}, "method", "object"),
    ("reinforcement without a body", {"model": "m", "training_file": "file-1", "method": {"type": "reinforcement"}},
     "method.reinforcement", "required"),
    ("reinforcement with an unknown hyperparameter",
     {"model": "m", "training_file": "file-1", "method": {"type": "reinforcement",
      "reinforcement": {"grader": GRADER, "hyperparameters": {"compute_multiplier": 2}}}},
     "method.reinforcement.hyperparameters.compute_multiplier", "counterpart"),
    ("an unknown preset", grpo(preset={"name": "recipe"}), "method.grpo.preset", "recipe_fixed"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "param", "words"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_an_error_names_the_field_and_the_remedy(raw: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_spec(raw)
    assert caught.value.param == param
    assert words in caught.value.message


def test_resolving_twice_changes_nothing() -> None:
    raw = {**EXAMPLE, "training_file": "file-1"}
    once = resolve_spec(raw)
    again = resolve_spec(json.loads(once.model_dump_json()))
    assert again == once


def test_what_was_sent_is_left_alone() -> None:
    raw = {**EXAMPLE, "training_file": "file-1"}
    before = copy.deepcopy(raw)
    resolve_spec(raw)
    assert raw == before


def paths(value: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    if isinstance(value, dict):
        inner = [place for key, item in value.items() for place in paths(item, (*prefix, key))]
    elif isinstance(value, list):
        inner = [place for index, item in enumerate(value) for place in paths(item, (*prefix, index))]
    else:
        inner = []
    return [prefix, *inner] if prefix else inner


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "rule", "value", "x"]), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_spec_with_anything_anywhere_is_resolved_or_refused(data: st.DataObject) -> None:
    raw: Any = copy.deepcopy({**EXAMPLE, "training_file": "file-1"})
    place = data.draw(st.sampled_from(paths(raw)))
    target = raw
    for part in place[:-1]:
        target = target[part]
    target[place[-1]] = data.draw(ANYTHING)
    refusal = None
    try:
        resolve_spec(raw)
    except GrpoError as error:
        refusal = error
    assert refusal is None or (refusal.message and 400 <= refusal.status < 500)
