"""Numeric cases made from public issues (the links are beside each): inputs of this project, answers recomputed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_engine.advantage import group_advantages
from grpo_engine.beta import BetaRule
from grpo_engine.contract.beta import ZieglerBeta
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import LossConfig, SamplingConfig
from grpo_engine.contract.kl import KlConfig
from grpo_engine.kl import kl_loss_tokens, kl_statistics, kl_value
from grpo_engine.loss import Normaliser, aggregate


@pytest.mark.parametrize(
    ("dtype", "logprob", "ref"),
    [
        (torch.float32, [-200.0, -1.0], [-1.0, -1.5]),
        (torch.float16, [-13.0, -1.0], [-1.0, -1.5]),
        (torch.float32, [-1.0], [-0.5]),
    ],
)
@pytest.mark.parametrize("grad", ["naive", "unbiased"])
def test_case_a03_one_far_token(dtype: torch.dtype, logprob: list[float], ref: list[float], grad: str) -> None:
    """https://github.com/huggingface/trl/issues/3015, https://github.com/OpenRLHF/OpenRLHF/issues/525"""
    policy = torch.tensor([logprob], dtype=dtype, requires_grad=True)
    cfg = KlConfig(grad=grad)  # type: ignore[arg-type]
    kl = kl_loss_tokens(policy, torch.tensor([ref], dtype=dtype), policy.detach(), None, torch.ones(1, len(ref)), cfg)
    kl.surrogate_BT.sum().backward()
    assert policy.grad is not None
    assert bool(torch.isfinite(kl.surrogate_BT).all())
    assert bool(torch.isfinite(kl.value_BT).all())
    assert bool(torch.isfinite(policy.grad).all())
    if len(ref) == 1:
        assert kl.surrogate_BT.item() == pytest.approx(0.1487212707, abs=1e-6)


@pytest.mark.parametrize("grad", ["naive", "unbiased"])
@pytest.mark.parametrize("direction", ["policy_ref", "ref_policy", "jeffreys"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_case_a03_a_token_that_the_reference_rules_out(dtype: torch.dtype, estimator: str, direction: str, grad: str) -> None:
    """https://github.com/huggingface/trl/pull/5594: log-probability minus infinity at the reference, as a masked vocabulary gives it."""
    policy = torch.tensor([[-1.0, -2.0]], dtype=dtype, requires_grad=True)
    ref = torch.tensor([[float("-inf"), -2.0]], dtype=dtype)
    cfg = KlConfig(estimator=estimator, direction=direction, grad=grad)  # type: ignore[arg-type]
    kl = kl_loss_tokens(policy, ref, policy.detach(), None, torch.ones(1, 2), cfg)
    kl.surrogate_BT.sum().backward()
    assert policy.grad is not None
    assert bool(torch.isfinite(kl.surrogate_BT).all())
    assert bool(torch.isfinite(policy.grad).all())
    assert kl.clipped_BT.tolist() == [[True, False]]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_sum", "constant"])
def test_case_a05_a_batch_without_a_token(aggregation: str) -> None:
    """https://github.com/huggingface/trl/pull/3248, https://github.com/verl-project/verl/issues/785"""
    loss, mask = torch.ones(2, 2, requires_grad=True), torch.zeros(2, 2)
    value = aggregate(loss, mask, Normaliser.create(mask, aggregation, 2))  # type: ignore[arg-type]
    value.backward()
    assert value.item() == 0.0
    assert loss.grad is not None
    assert not loss.grad.any()
    assert kl_statistics(loss, mask) == {}


def test_case_a06_values_of_both_directions() -> None:
    """https://github.com/huggingface/trl/issues/2854. Samples are the policy's: swapped, an estimate carries the weight
    r = pi_ref / pi_theta (the formula at the head of grpo_engine/kl.py). Exchanging the arguments instead gives the values
    for samples of the other side."""
    policy = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    ref = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    means = {name: kl_value(policy, ref, name).mean().item() for name in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    assert means == pytest.approx({"k1": -0.1666667, "k2": 0.2083333, "k3": 0.2749375}, abs=1e-6)
    exchanged = {name: kl_value(ref, policy, name).mean().item() for name in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    assert exchanged == pytest.approx({"k1": 0.1666667, "k2": 0.2083333, "k3": 0.1722002}, abs=1e-6)
    weighted = kl_value(policy, ref, "k3", "ref_policy")
    r = (ref - policy).exp()
    assert weighted.tolist() == pytest.approx((r * kl_value(ref, policy, "k3")).tolist(), abs=1e-12)


def test_case_a12_the_proportional_rule() -> None:
    """https://github.com/radixark/miles/pull/3222"""
    settings = {"rule": "ziegler", "value": 0.1, "target": 0.1, "horizon": 10, "unit": "token", "arming": False}
    rule = BetaRule.create(validate(ZieglerBeta, settings), 100)
    betas = [rule.update(step, kl, kl, 1).new for step, kl in enumerate([0.3, 0.3, 0.05, 0.1], start=1)]
    assert betas == pytest.approx([0.102, 0.10404, 0.1019592, 0.1019592], abs=1e-9)


def test_case_b01_a_group_of_one() -> None:
    """https://github.com/huggingface/trl/pull/3199"""
    with pytest.raises(InvalidRequest, match="greater than or equal to 2"):
        validate(SamplingConfig, {"group_size": 1})


def test_case_b03_normalised_within_the_group() -> None:
    """https://github.com/XU-YIJIE/grpo-flat/issues/2"""
    rewards = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.float64)
    got = group_advantages(rewards, LossConfig()).advantage_PG.flatten().tolist()
    assert got == pytest.approx([0.8660254, 0.8660254, -0.8660254, -0.8660254, -0.5, -0.5, -0.5, 1.5], abs=2e-3)


@pytest.mark.parametrize("group", [[0.3, 0.3, 0.30000000000000004, 0.3], [0.1] * 7])
@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e-4])
def test_case_b05_rewards_equal_in_meaning(group: list[float], eps: float) -> None:
    """https://github.com/NVIDIA-NeMo/RL/pull/4161"""
    got = group_advantages(torch.tensor([group], dtype=torch.float64), LossConfig(adv_eps=eps))
    assert got.is_zero_std_P.tolist() == [True]
    assert not got.advantage_PG.any()


def test_case_b05_a_singleton_stays_below_its_bound() -> None:
    rewards = torch.tensor([[0.35] * 7 + [0.95]], dtype=torch.float64)
    assert group_advantages(rewards, LossConfig(adv_eps=0.0)).advantage_PG.abs().max().item() == pytest.approx(7 / math.sqrt(8))


@pytest.mark.parametrize("micro", [[[0, 1, 2, 3]], [[0], [1], [2], [3]]])
@pytest.mark.parametrize("width", [40, 57])
def test_case_b11_the_constant_divisor(micro: list[list[int]], width: int) -> None:
    """https://github.com/verl-project/verl/issues/3741, https://github.com/huggingface/trl/pull/3256"""
    mask = torch.stack([(torch.arange(width) < length).float() for length in (10, 20, 30, 40)])
    normaliser = Normaliser.create(mask, "constant", 100)
    total = sum(float(aggregate(mask[rows].double(), mask[rows], normaliser)) for rows in micro)
    assert total == pytest.approx(0.25, abs=1e-9)
