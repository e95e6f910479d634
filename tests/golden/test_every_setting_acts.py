"""A walk over the schema: change one setting at a time and some number must change. What is accepted is never ignored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from grpo_engine.adapter import inject
from grpo_engine.advantage import group_advantages
from grpo_engine.beta import BetaRule
from grpo_engine.contract.aggregation import kl_aggregation, loss_aggregation
from grpo_engine.contract.beta import (
    Calibration,
    ConstantSchedule,
    DeadbandBeta,
    FixedBeta,
    PiecewiseSchedule,
    PpoBeta,
    RampSchedule,
    ScheduleBeta,
    ZieglerBeta,
)
from grpo_engine.contract.diagnostics import DETECTOR_NAMES, DiagnosticsConfig
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import LoraConfig, LossConfig
from grpo_engine.contract.kl import KlConfig
from grpo_engine.kl import ExactKl, exact_kl, kl_loss_tokens, kl_penalty
from grpo_engine.loss import Normaliser, aggregate, policy_loss_tokens
from tests.tiny import make_module

GENERATOR = torch.Generator().manual_seed(11)
LOGITS_BTV, REF_LOGITS_BTV = (3 * torch.randn(4, 5, 7, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
OLD_BT, SAMPLER_BT = (-2 * torch.rand(4, 5, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
MASK_BT = torch.tensor([[1, 1, 0, 0, 0], [1] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
REWARD_PG = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
TRUNCATED_PG = torch.tensor([[False, True], [False, True]])


def kl_numbers(cfg: KlConfig) -> list[float]:
    """Loss, gradient, penalty and clips of one step under a KL configuration."""
    logits = LOGITS_BTV.clone().requires_grad_()
    logprob_BTV, ref_BTV = torch.log_softmax(logits, -1), torch.log_softmax(REF_LOGITS_BTV, -1)
    logprob_BT, ref_BT = logprob_BTV[..., 0], ref_BTV[..., 0]
    if cfg.placement != "loss":
        penalty = kl_penalty(logprob_BT.detach(), ref_BT, MASK_BT, cfg)
        return [*penalty.penalty_BT.flatten().tolist(), *penalty.clipped_BT.flatten().tolist()]
    exact = ExactKl(exact_kl(logprob_BTV, ref_BTV, cfg.direction)) if cfg.estimator == "exact" else None
    tokens = kl_loss_tokens(logprob_BT, ref_BT, OLD_BT, SAMPLER_BT, MASK_BT, cfg, exact)
    aggregation = kl_aggregation(cfg, LossConfig(type="grpo"))
    loss = aggregate(tokens.surrogate_BT, MASK_BT, Normaliser.create(MASK_BT, aggregation, 9))
    loss.backward()
    assert logits.grad is not None
    return [loss.item(), *logits.grad.flatten().tolist(), *tokens.clipped_BT.flatten().tolist()]


def loss_numbers(cfg: LossConfig) -> list[float]:
    """Loss and gradient of the policy term of one step."""
    logprob_BT = torch.log_softmax(LOGITS_BTV, -1)[..., 0].clone().requires_grad_()
    advantages = group_advantages(REWARD_PG, cfg, TRUNCATED_PG)
    mask_BT = MASK_BT * advantages.policy_keep_PG.reshape(4, 1)
    kl_mask_BT = MASK_BT * advantages.kl_keep_PG.reshape(4, 1)
    policy = policy_loss_tokens(logprob_BT, OLD_BT, advantages.advantage_PG.flatten(), mask_BT, cfg)
    loss = aggregate(policy.loss_BT, mask_BT, Normaliser.create(mask_BT, loss_aggregation(cfg), 9))
    loss.backward()
    assert logprob_BT.grad is not None
    return [loss.item(), *logprob_BT.grad.flatten().tolist(), float(kl_mask_BT.sum())]


def beta_numbers(cfg: Any) -> list[float]:
    """Beta over two hundred steps of a KL that rises, falls and vanishes; tokens and sequences differ."""
    rule = BetaRule.create(cfg, 200)
    series = []
    for step in range(1, 201):
        kl = abs(0.06 * math.sin(step / 25)) * (1 - step / 250) + 0.002 * (step % 3)
        series.append(rule.update(step, kl, 30 * kl if step % 7 else 0.0, 16).new)
    return series


KL_BASES = [
    KlConfig(log_ratio_clip=1.0, value_clip=0.5, clip_grad="zero", importance_clip=1.5),
    KlConfig(estimator="k1", placement="reward", discount=0.9, log_ratio_clip=1.0, value_clip=0.5),
]
KL_CHANGES: list[tuple[int, dict[str, Any]]] = [
    *[(0, {"direction": value}) for value in ("ref_policy", "jeffreys")],
    *[(0, {"estimator": value}) for value in ("k1", "k2", "abs")],
    (0, {"estimator": "exact", "importance": "none", "importance_clip": None, "log_ratio_clip": None}),
    (0, {"grad": "naive"}),
    (0, {"importance": "sampler"}),
    (0, {"importance": "none", "importance_clip": None}),
    (0, {"importance_clip": 1.2}),
    *[(0, {"aggregation": value}) for value in ("token_mean", "seq_sum", "constant")],
    (0, {"log_ratio_clip": 2.0}),
    (0, {"value_clip": 0.1}),
    (0, {"clip_grad": "straight_through"}),
    (1, {"placement": "advantage"}),
    (1, {"discount": 0.5}),
    (1, {"log_ratio_clip": 2.0}),
    (1, {"value_clip": 0.1}),
]
KL_ELSEWHERE = {
    "monitor": "loads the reference: test_issue_trl_2806",
    "allow_biased": "lifts a refusal: test_issue_open_instruct_534",
}


@pytest.mark.parametrize(("base", "change"), KL_CHANGES)
def test_issue_slime_397_every_kl_setting_acts(base: int, change: dict[str, Any]) -> None:
    changed = validate(KlConfig, {**KL_BASES[base].model_dump(), **change})
    assert kl_numbers(changed) != pytest.approx(kl_numbers(KL_BASES[base]), abs=1e-9)


LOSS_BASE = LossConfig(epsilon=0.2, adv_eps=0.1)
LOSS_CHANGES: list[dict[str, Any]] = [
    *[{"type": value} for value in ("dr_grpo", "dapo", "gspo", "bnpo", "cispo")],
    *[{"scale_rewards": value} for value in ("batch", "none")],
    {"adv_eps": 0.5},
    {"ddof": 0},
    *[{"aggregation": value} for value in ("token_mean", "seq_sum", "constant")],
    {"epsilon": 0.4},
    {"epsilon_high": 0.4},
    *[{"zero_std_groups": value} for value in ("mask_policy", "drop_all")],
    {"mask_truncated": True},
]
LOSS_ELSEWHERE = {
    "num_iterations": "a loop of the engine: its own tests",
    "dynamic_sampling": "draws prompts: tests/engine/test_dynamic_sampling.py",
    "dynamic_sampling_rounds": "bounds the draws: tests/engine/test_dynamic_sampling.py",
}


@pytest.mark.parametrize("change", LOSS_CHANGES)
def test_issue_slime_397_every_loss_setting_acts(change: dict[str, Any]) -> None:
    changed = validate(LossConfig, {**LOSS_BASE.model_dump(), **change})
    assert loss_numbers(changed) != pytest.approx(loss_numbers(LOSS_BASE), abs=1e-9)


ADAPTIVE: dict[str, Any] = {"value": 0.02, "target": 0.02, "update_every": 4, "ema_decay": 0.5, "min": 0.01, "max": 0.022}
SCHEDULE = {"type": "linear", "start": 0.02, "end": 0.05}
CALIBRATION = {"rollouts": 12, "discard": 1, "min": 0.005, "max": 0.1, "fixed_value": 0.03}
SHARED_CHANGES: list[dict[str, Any]] = [
    {"value": 0.021},
    {"value": None, "schedule": SCHEDULE},
    {"target": 0.015},
    {"target": None, "calibration": CALIBRATION},
    {"update_every": 6},
    {"ema_decay": None},
    {"arming": False},
    {"min": 0.001},
    {"max": 0.5},
]
BETA_CHANGES: list[tuple[type[BaseModel], dict[str, Any], dict[str, Any]]] = [
    (FixedBeta, {"value": 0.02}, {"value": 0.03}),
    (ScheduleBeta, {"rule": "schedule", "schedule": SCHEDULE}, {"schedule": {**SCHEDULE, "end": 0.06}}),
    *[(DeadbandBeta, {"rule": "deadband", "unit": "token", **ADAPTIVE}, {"unit": "sequence"}) for _ in range(1)],
    *[
        (model, {"rule": rule, "unit": "token", **ADAPTIVE, **extra}, change)
        for model, rule, extra in (
            (DeadbandBeta, "deadband", {}),
            (PpoBeta, "ppo", {}),
            (ZieglerBeta, "ziegler", {"horizon": 300.0, "min": 0.0195}),
        )
        for change in SHARED_CHANGES
    ],
    *[
        (DeadbandBeta, {"rule": "deadband", **ADAPTIVE, "max": 0.5}, change)
        for change in ({"up": 1.3}, {"down": 1.3}, {"low_ratio": 0.5}, {"high_ratio": 1.4})
    ],
    *[(PpoBeta, {"rule": "ppo", **ADAPTIVE, "max": 0.5}, change) for change in ({"factor": 1.5}, {"band": 1.2}, {"unit": "sequence"})],
    *[
        (ZieglerBeta, {"rule": "ziegler", "unit": "token", **ADAPTIVE, "horizon": 300.0}, change)
        for change in ({"horizon": 400.0}, {"clip": 0.1}, {"unit": "sequence"})
    ],
]


@pytest.mark.parametrize(("model", "base", "change"), BETA_CHANGES)
def test_issue_slime_397_every_beta_setting_acts(model: type[BaseModel], base: dict[str, Any], change: dict[str, Any]) -> None:
    before, after = validate(model, base), validate(model, {**base, **change})
    assert beta_numbers(after) != pytest.approx(beta_numbers(before), abs=1e-12)


SCHEDULE_CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "constant", "value": 0.02}, {"value": 0.03}),
    *[
        ({"type": "linear", "start": 0.01, "end": 0.02}, change)
        for change in ({"type": "cosine"}, {"start": 0.0}, {"end": 0.03}, {"hold_ratio": 0.2})
    ],
    ({"type": "piecewise", "points": [[0, 0.1], [0.5, 0.2]]}, {"points": [[0, 0.1], [0.6, 0.2]]}),
    ({"type": "piecewise", "points": [[0, 0.1], [0.5, 0.2]]}, {"interpolation": "step"}),
]


@pytest.mark.parametrize(("base", "change"), SCHEDULE_CHANGES)
def test_issue_slime_397_every_schedule_setting_acts(base: dict[str, Any], change: dict[str, Any]) -> None:
    before, after = (validate(ScheduleBeta, {"rule": "schedule", "schedule": schedule}) for schedule in (base, {**base, **change}))
    assert beta_numbers(after) != pytest.approx(beta_numbers(before), abs=1e-12)


@pytest.mark.parametrize(
    "change", [{"rollouts": 20}, {"discard": 3}, {"stat": "mean"}, {"min": 0.03}, {"max": 0.006}, {"fixed_value": 0.04}]
)
def test_issue_slime_397_every_calibration_setting_acts(change: dict[str, Any]) -> None:
    plain = {"rule": "deadband", "value": 0.02, "update_every": 1, "ema_decay": None, "arming": False}
    before, after = (validate(DeadbandBeta, {**plain, "calibration": each}) for each in (CALIBRATION, {**CALIBRATION, **change}))
    assert [*beta_numbers(after), target_of(after)] != pytest.approx([*beta_numbers(before), target_of(before)], abs=1e-12)


def target_of(cfg: DeadbandBeta) -> float:
    """The target a warm-up with uneven KL leads to."""
    rule = BetaRule.create(cfg, 200)
    for step in range(1, 30):
        rule.update(step, 0.001 * step**1.5, 0.0, 16)
    assert rule.target is not None
    return rule.target


def lora_numbers(cfg: LoraConfig) -> list[float]:
    """Logits of a tiny model whose adapter is no longer at its start."""
    module = make_module("TINY", 20)
    inject(module, cfg, seed=3, base_name="tiny")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.01)
        return [float(value) for value in module(torch.arange(6)[None]).logits.flatten()]


LORA_CHANGES: list[dict[str, Any]] = [{"rank": 8}, {"alpha": 16.0}, {"target_modules": ["q_proj", "v_proj"]}]


@pytest.mark.parametrize("change", LORA_CHANGES)
def test_issue_slime_397_every_adapter_setting_acts(change: dict[str, Any]) -> None:
    base = LoraConfig(type="lora")
    changed = validate(LoraConfig, {**base.model_dump(), **change})
    assert lora_numbers(changed) != pytest.approx(lora_numbers(base), abs=1e-4)
    assert lora_numbers(base) == lora_numbers(LoraConfig(type="lora")), "the same seed gives the same adapter"


def walked(changes: Iterator[dict[str, Any]]) -> set[str]:
    return {name for change in changes for name in change}


def test_the_walk_leaves_no_setting_out() -> None:
    assert walked(change for _, change in KL_CHANGES) | set(KL_ELSEWHERE) == set(KlConfig.model_fields)
    assert walked(iter(LOSS_CHANGES)) | set(LOSS_ELSEWHERE) == set(LossConfig.model_fields)
    assert walked(iter(LORA_CHANGES)) | {"type"} == set(LoraConfig.model_fields)
    for model in (FixedBeta, ScheduleBeta, DeadbandBeta, PpoBeta, ZieglerBeta):
        assert walked(change for each, _, change in BETA_CHANGES if each is model) == set(model.model_fields) - {"rule"}
    for model, kinds in ((ConstantSchedule, ["constant"]), (RampSchedule, ["linear", "cosine"]), (PiecewiseSchedule, ["piecewise"])):
        changed = walked(change for base, change in SCHEDULE_CHANGES if base["type"] in kinds)
        assert changed | {"type"} == set(model.model_fields)
    assert set(Calibration.model_fields) == {"rollouts", "discard", "stat", "min", "max", "fixed_value"}


def test_every_detector_can_be_switched_off_and_is_listed() -> None:
    assert tuple(DiagnosticsConfig.model_fields) == DETECTOR_NAMES
