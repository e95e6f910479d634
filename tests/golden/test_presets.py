"""Presets: the recipe to the letter, the papers, and the job's own keys on top."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_engine.beta import BetaRule
from grpo_engine.contract.advice import advise
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.job import GrpoConfig, JobSpec
from grpo_engine.contract.presets import PRESETS, apply_preset

EVERY = [(card.name, size) for card in PRESETS for size in (None, *card.sizes)]


def spec(**grpo: Any) -> JobSpec:
    grpo = {"grader": {"type": "math"}, **grpo}
    return resolve_spec({"model": "m", "training_file": "file-a", "method": {"type": "grpo", "grpo": grpo}})


def job(**grpo: Any) -> GrpoConfig:
    return spec(**grpo).method.grpo


def test_the_list_is_complete() -> None:
    assert [card.name for card in PRESETS] == [
        "recipe_fixed", "recipe_adaptive", "recipe_calibrated", "deepseekmath_2024", "deepseek_r1", "deepseek_v3_2", "dapo", "dr_grpo",
        "ziegler2019", "ppo2017",
    ]  # fmt: skip
    for name in ("recipe_fixed", "recipe_adaptive", "recipe_calibrated"):
        assert set(next(card for card in PRESETS if card.name == name).sizes) == {"lt1b", "7b", "70b"}


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_each_preset_is_a_valid_job_and_its_resolved_form_stays_as_it_is(name: str, size: str | None) -> None:
    resolved = spec(preset={"name": name, "size": size})
    again = resolve_spec(json.loads(resolved.model_dump_json()))
    assert again == resolved
    assert json.loads(json.dumps([card.model_dump() for card in PRESETS]))


def test_the_adaptive_recipe_to_the_letter() -> None:
    beta = job(preset={"name": "recipe_adaptive", "size": "7b"}).beta
    assert beta.model_dump() == {
        "rule": "deadband",
        "value": None,
        "schedule": {"type": "linear", "start": 0.005, "end": 0.02, "hold_ratio": 0.1},
        "target": 0.02,
        "unit": "token",
        "update_every": 50,
        "ema_decay": 0.9,
        "up": 1.2,
        "down": 1.2,
        "low_ratio": 0.8,
        "high_ratio": 1.0,
        "arming": False,
        "min": 1e-5,
        "max": 1.0,
        "calibration": None,
    }
    rule = BetaRule.create(beta, 1000)
    assert [rule.value(step) for step in (1, 100, 1000)] == [0.005, 0.005, 0.02]


def test_the_recipes_kl_to_the_letter() -> None:
    kl = job(preset="recipe_fixed").kl
    assert (kl.estimator, kl.grad, kl.direction, kl.placement) == ("k1", "unbiased", "policy_ref", "loss")
    assert (kl.aggregation, kl.log_ratio_clip, kl.value_clip) == ("seq_mean_token_mean", None, None)
    literal = job(preset="recipe_fixed", kl={"grad": "naive", "allow_biased": True}).kl
    assert (literal.estimator, literal.grad) == ("k1", "naive")


def test_the_calibrated_recipe_warms_up_at_a_fixed_beta() -> None:
    for size, beta in (("7b", 0.02), ("70b", 0.01)):
        rule = BetaRule.create(job(preset={"name": "recipe_calibrated", "size": size}).beta, 100)
        assert rule.value(1) == beta
        for step in range(1, 11):
            rule.update(step, 0.03, 0.03, 8)
        assert rule.target == 0.03


def test_the_papers() -> None:
    r1 = job(preset="deepseek_r1")
    assert (r1.loss.epsilon, r1.reference.sync_every, r1.reference.mixup_alpha) == (10.0, 400, 1.0)
    assert (job(preset="deepseek_v3_2").kl.grad, job(preset="deepseek_v3_2").loss.scale_rewards) == ("unbiased", "none")
    dapo = job(preset="dapo")
    assert (dapo.loads_reference, dapo.loss.epsilon_high, dapo.loss.aggregation) == (False, 0.28, "token_mean")
    dr = job(preset="dr_grpo").loss
    assert (dr.type, dr.scale_rewards, dr.aggregation) == ("dr_grpo", "none", "constant")
    ppo = BetaRule.create(job(preset="ppo2017").beta, 10)
    assert [ppo.update(1, 0.016, 0.0, 8).new, ppo.update(2, 0.006, 0.0, 8).new] == pytest.approx([0.04, 0.02])
    ziegler = job(preset="ziegler2019").beta
    assert (ziegler.unit, ziegler.target) == ("sequence", 6.0)  # type: ignore[union-attr]


class TestTheJobsOwnKeysWin:
    def test_other_keys_of_the_same_object_stay(self) -> None:
        kl = job(preset="recipe_fixed", kl={"estimator": "k3"}).kl
        assert (kl.estimator, kl.aggregation) == ("k3", "seq_mean_token_mean")

    def test_a_beta_of_the_same_rule_is_merged(self) -> None:
        for beta in ({"rule": "deadband", "target": 0.03}, {"target": 0.03}):
            merged = job(preset="recipe_adaptive", beta=beta).beta
            assert (merged.target, merged.ema_decay, merged.schedule.start) == (0.03, 0.9, 0.005)  # type: ignore[union-attr]

    @pytest.mark.parametrize("beta", [0.1, {"rule": "fixed", "value": 0.1}])
    def test_a_beta_of_another_rule_or_a_number_replaces_it(self, beta: Any) -> None:
        assert job(preset="recipe_adaptive", beta=beta).beta.model_dump() == {"rule": "fixed", "value": 0.1}

    def test_an_alias_of_beta_replaces_it_too(self) -> None:
        assert job(preset="recipe_adaptive", kl_coef=0.1).beta.model_dump() == {"rule": "fixed", "value": 0.1}

    def test_keys_that_exclude_each_other_displace_the_presets(self) -> None:
        by_value = job(preset="recipe_adaptive", beta={"value": 0.03}).beta
        assert (by_value.value, by_value.schedule) == (0.03, None)  # type: ignore[union-attr]
        by_target = job(preset="recipe_calibrated", beta={"target": 0.03}).beta
        assert (by_target.target, by_target.calibration) == (0.03, None)  # type: ignore[union-attr]
        by_kind = job(preset="recipe_adaptive", beta={"schedule": {"type": "constant", "value": 0.01}}).beta
        assert by_kind.schedule.model_dump() == {"type": "constant", "value": 0.01}  # type: ignore[union-attr]

    def test_null_wins(self) -> None:
        assert job(preset="recipe_adaptive", beta={"ema_decay": None}).beta.ema_decay is None  # type: ignore[union-attr]

    def test_the_raw_job_is_not_changed(self) -> None:
        raw = {"method": {"grpo": {"preset": "dapo", "loss": {"epsilon": 0.1}}}}
        before = json.dumps(raw)
        assert apply_preset(raw)["method"]["grpo"]["loss"]["epsilon"] == 0.1
        assert json.dumps(raw) == before


@pytest.mark.parametrize(
    ("preset", "param", "words"),
    [
        ("recipe", "method.grpo.preset", "recipe_fixed, recipe_adaptive"),
        ({"name": "recipe_fixed", "size": "13b"}, "method.grpo.preset.size", "lt1b, 7b, 70b"),
        ({"name": "dapo", "size": "7b"}, "method.grpo.preset.size", "has none"),
        ({"name": 5}, "method.grpo.preset.name", "string"),
        (7, "method.grpo.preset", ""),
    ],
)
def test_what_is_wrong_with_a_preset_is_said(preset: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job(preset=preset)
    assert caught.value.param == param
    assert words in caught.value.message


def advice(**grpo: Any) -> set[str]:
    return {each.code for each in advise(job(**grpo))}


def test_advice_warns_and_never_refuses() -> None:
    assert advice() == set()
    assert advice(beta=0.11) == {"beta_high"}
    assert advice(beta=0.0005) == {"beta_low"}
    assert advice(beta=0) == set()
    assert advice(beta={"rule": "schedule", "schedule": {"type": "linear", "start": 0.0005, "end": 0.5}}) == {"beta_high", "beta_low"}
    plain = {"rule": "deadband", "value": 0.02}
    assert advice(beta={**plain, "target": 0.004}) == {"target_too_small"}
    assert advice(beta={**plain, "target": 0.11}) == {"target_too_large"}
    assert advice(beta={**plain, "target": 0.02}, limits={"num_steps": 49}) == {"rule_never_acts"}
    assert advice(beta={**plain, "target": 0.02, "arming": False}) == {"no_arming"}
    assert advice(kl={"grad": "naive"}) == {"biased_gradient"}
    assert advice(kl={"clip_grad": "zero"}) == {"zero_clip_gradient"}
    assert advice(kl={"aggregation": "seq_sum"}) == {"length_bias"}
    assert advice(kl={"importance": "none"}, loss={"num_iterations": 2}) == {"no_importance"}
