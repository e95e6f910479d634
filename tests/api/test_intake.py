"""From JSON to a spec: whatever is sent, the answer is a spec or an error that names a field of what was sent."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.contract import intake
from grpo_engine.contract.error import GrpoError, InvalidRequest
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.nearest import nearest

EXAMPLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "examples" / "arithmetic.json").read_bytes())
GRADER = {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"}


def grpo(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "training_file": "file-1", "method": {"type": "grpo", "grpo": {"grader": GRADER, **changes}}}


HYPER = "method.reinforcement.hyperparameters."


def reinforcement(grader: dict[str, Any] = GRADER, **hyperparameters: Any) -> dict[str, Any]:
    body = {"grader": grader, "hyperparameters": hyperparameters}
    return {"model": "m", "training_file": "file-1", "method": {"type": "reinforcement", "reinforcement": body}}


ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("an unknown key deep down", grpo(sampling={"groupsize": 4}), "method.grpo.sampling.groupsize", "group_size"),
    ("a wrong tag", grpo(beta={"rule": "adaptive"}), "method.grpo.beta.rule", "deadband"),
    ("no tag", grpo(grader={"pattern": "a"}), "method.grpo.grader.type", "required"),
    ("a key of another rule", grpo(beta={"rule": "fixed", "value": 0.1, "target": 0.1}), "method.grpo.beta.target", "unknown key"),
    ("value and schedule", grpo(beta={"rule": "deadband", "target": 0.1}), "method.grpo.beta.value", "value and schedule"),
    ("two names for beta", grpo(beta=0.1, kl_coef=0.1), "method.grpo.kl_coef", "given twice"),
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
    ("reinforcement with a reasoning effort", reinforcement(reasoning_effort="high"), HYPER + "reasoning_effort", "counterpart"),
    ("a negative alias of beta", grpo(kl_coef=-1), "method.grpo.kl_coef", "greater than or equal to 0"),
    ("inside an alias of beta", grpo(kl_coef={"rule": "ppo", "value": 0.1, "target": -1}), "method.grpo.kl_coef.target", "above 0"),
    ("reinforcement with a negative rate", reinforcement(learning_rate=-1), HYPER + "learning_rate", "greater than 0"),
    ("reinforcement with an alias", reinforcement(kl_beta=-1), HYPER + "kl_beta", "greater than or equal to 0"),
    ("reinforcement and the estimator", reinforcement(kl={"estimator": "k4"}), HYPER + "kl.estimator", "k3"),
    ("reinforcement and its grader", reinforcement({"type": "regex"}), "method.reinforcement.grader.pattern", "required"),
    ("reinforcement without a grader", {**grpo(), "method": {"type": "reinforcement", "reinforcement": {}}},
     "method.reinforcement.grader", "give a grader, or an environment"),
    ("OpenAI's older place", {"model": "m", "training_file": "file-1", "hyperparameters": {"n_epochs": 3}},
     "hyperparameters", "give method:"),
    ("both places", {**grpo(), "hyperparameters": None}, "hyperparameters", "remove them"),
    ("no method", {"model": "m", "training_file": "file-1", "seed": "x"}, "method", 'give method: {"type": "grpo"'),
    ("integrations", {**grpo(), "integrations": []}, "integrations", "'integrations'; remove it"),
    ("one level too high", {**grpo(), "resources": {"gpus": 1}}, "resources", "did you mean 'method.grpo.resources'?"),
    ("three levels too high", {**grpo(), "learning_rate": 1e-5}, "learning_rate", "did you mean 'method.grpo.optimizer.learning_rate'?"),
    ("of several places the nearest", {**grpo(), "grader": GRADER}, "grader", "did you mean 'method.grpo.grader'?"),
    ("a key of another rule only", grpo(beta={"rule": "fixed", "value": 0.1, "target": 0.1}), "method.grpo.beta.target", "'; remove it"),
    ("near to a key of another rule", grpo(beta={"rule": "fixed", "value": 0.1, "targt": 1}), "method.grpo.beta.targt", "'; remove it"),
    ("in a mapping", grpo(grader={"type": "multi", "graders": {"a": {**GRADER, "refrence": "x"}}, "weights": {"a": 1.0}}),
     "method.grpo.grader.graders.a.refrence", "did you mean 'reference'?"),
    ("reinforcement with a grpo body", {**grpo(), "method": {"type": "reinforcement", "grpo": {"grader": GRADER}}},
     "method.grpo", "set the type"),
    ("grpo with a reinforcement body", {**grpo(), "method": {"type": "grpo", "reinforcement": {"grader": GRADER}}},
     "method.reinforcement", "set the type"),
    ("a list of hyperparameters",
     {**grpo(), "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": []}}},
     HYPER[:-1], "leave it out"),
    ("an unknown preset", grpo(preset={"name": "recipe"}), "method.grpo.preset", "recipe_fixed"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "param", "words"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_an_error_names_the_field_and_the_remedy(raw: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_spec(raw)
    assert caught.value.param == param
    assert words in caught.value.message


STEERED = {"rule": "deadband", "value": 0.04, "target": 0.1}
RULES: list[tuple[str, dict[str, Any]]] = [
    ("beta.target", {"beta": {**STEERED, "target": 0}}),
    ("beta.target", {"beta": {**STEERED, "target": None}}),
    ("beta.calibration", {"beta": {**STEERED, "calibration": {}}}),
    ("beta.schedule", {"beta": {**STEERED, "schedule": {"type": "constant", "value": 1}}}),
    ("beta.schedule", {"beta": {**STEERED, "value": None, "schedule": {"type": "constant", "value": 0}}}),
    ("beta.value", {"beta": {**STEERED, "value": 0}}),
    ("beta.value", {"beta": {**STEERED, "value": 3}}),
    ("beta.min", {"beta": {**STEERED, "min": 0.5, "max": 0.1}}),
    ("beta.update_every", {"beta": {**STEERED, "update_every": 2}}),
    ("beta.calibration.min", {"beta": {**STEERED, "target": None, "unit": "sequence", "calibration": {}}}),
    ("beta.calibration.max", {"beta": {**STEERED, "target": None, "unit": "sequence", "calibration": {"min": 0.05}}}),
    ("beta.calibration.discard", {"beta": {**STEERED, "target": None, "calibration": {"discard": 10}}}),
    ("beta.calibration.min", {"beta": {**STEERED, "target": None, "calibration": {"min": 0.5}}}),
    ("beta.schedule.points[0][0]", {"beta": {"rule": "schedule", "schedule": {"type": "piecewise", "points": [[0.1, 1]]}}}),
    ("beta.schedule.points[2][0]", {"beta": {"rule": "schedule", "schedule": {"type": "piecewise", "points": [[0, 1], [1, 1], [1, 2]]}}}),
    ("beta.schedule.points[1][0]", {"beta": {"rule": "schedule", "schedule": {"type": "piecewise", "points": [[0, 1], [1.5, 1]]}}}),
    ("beta.schedule.type", {"beta": {"rule": "schedule", "schedule": {"type": "sine"}}}),
    ("kl.grad", {"kl": {"estimator": "k1", "grad": "naive"}}),
    ("kl.estimator", {"kl": {"estimator": "exact", "placement": "reward"}}),
    ("kl.estimator", {"kl": {"placement": "advantage"}}),
    ("kl.direction", {"kl": {"estimator": "k1", "placement": "reward", "direction": "forward"}}),
    ("kl.discount", {"kl": {"discount": 0.5}}),
    ("kl.aggregation", {"kl": {"estimator": "k1", "placement": "reward", "aggregation": "seq_sum"}}),
    ("kl.log_ratio_clip", {"kl": {"estimator": "exact", "log_ratio_clip": 5}}),
    ("kl.importance_clip", {"kl": {"importance": "none", "importance_clip": 2}}),
    ("kl.clip_grad", {"kl": {"clip_grad": "zero", "log_ratio_clip": None}}),
    ("guardrails[0].action.value", {"guardrails": [{"detector": "kl_out_of_control", "action": {"type": "set_beta", "value": 2}}],
                                    "beta": STEERED}),
    ("guardrails[0].window", {"guardrails": [{"detector": "kl_out_of_control", "action": "stop", "consecutive": 3, "window": 2}]}),
    ("guardrails[0].action.beta_factor", {"guardrails": [{"detector": "kl_out_of_control", "action": {"type": "rollback"}}]}),
    ("telemetry.gradient_split_every", {"beta": 0, "telemetry": {"gradient_split_every": 1}}),
    ("grader.weights", {"grader": {"type": "multi", "graders": {"a": GRADER}}}),
    ("grader.calculate_output", {"grader": {"type": "multi", "graders": {"a": GRADER}, "weights": {"a": 1}, "calculate_output": "a"}}),
    ("grader.target_min", {"grader": {"type": "length", "target_min": 9, "target_max": 3}}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "changes"), RULES)
def test_a_rule_of_several_fields_names_the_one_to_change(param: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_spec(grpo(**changes))
    assert caught.value.param == f"method.grpo.{param}"
    assert caught.value.message.startswith(f"method.grpo.{param}")


def test_what_openai_calls_default_is_ours() -> None:
    automatic = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto", "reasoning_effort": "default"}
    assert resolve_spec(reinforcement(**automatic)) == resolve_spec(grpo())


def test_every_rule_across_fields_names_a_field() -> None:
    """A plain ValueError in a validator would blame the parent object."""
    folder = Path(intake.__file__).parent
    blunt = {path.name for path in folder.glob("*.py") if "raise ValueError(" in path.read_text()}
    assert blunt <= {"command.py"}, "only the internal Command may; requests use broken_rule"


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


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("bta", "beta"), ("betta", "beta"), ("sufix", "suffix"), ("learning_rat", "learning_rate"), ("num_step", "num_steps"),
        ("estimater", "estimator"), ("epochs", None), ("batch_size", None), ("gpu_type", None), ("x", None), ("lr", None),
    ],
)  # fmt: skip
def test_only_a_key_that_is_alike_is_suggested(written: str, meant: str | None) -> None:
    known = ["beta", "suffix", "learning_rate", "num_steps", "estimator", "eps", "every", "betas", "type", "group_size", "max", "seed"]
    assert nearest(written, known) == meant


def test_a_common_prefix_is_no_likeness() -> None:
    assert nearest("GRPO_COLOUR", ["GRPO_HOST", "GRPO_PORT", "GRPO_SLOTS"], prefix="GRPO_") is None
    assert nearest("GRPO_SLOT", ["GRPO_HOST", "GRPO_PORT", "GRPO_SLOTS"], prefix="GRPO_") == "GRPO_SLOTS"
