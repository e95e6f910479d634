"""Numerical accidents that made real runs fail: overflow, cancellation, masks, clips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.contract.kl import Direction, Estimator, KlConfig
from grpo_engine.kl import KlTokens, exact_kl, kl_loss_tokens, kl_value

SAMPLED: tuple[Estimator, ...] = ("k1", "k2", "k3", "abs")
DIRECTIONS: tuple[Direction, ...] = ("policy_ref", "ref_policy", "jeffreys")


def one_token(x: float, dtype: torch.dtype = torch.float64, logprob: float = -5.0, **settings: Any) -> tuple[KlTokens, float]:
    """The KL term and its gradient for one token with log pi_ref - log pi_theta = x."""
    policy = torch.tensor([[logprob]], dtype=dtype, requires_grad=True)
    ref = torch.tensor([[logprob + x]], dtype=torch.float64)
    tokens = kl_loss_tokens(policy, ref, policy.detach(), policy.detach(), torch.ones(1, 1), KlConfig(**settings, allow_biased=True))
    tokens.surrogate_BT.sum().backward()
    assert policy.grad is not None
    return tokens, policy.grad.item()


def test_a_clipped_value_keeps_its_gradient() -> None:
    """k3 > 10 is x > 2.6109, where the policy gives a token less than 7.35 % of its reference probability: several peers
    drop the gradient exactly there."""
    assert one_token(2.60, grad="naive", value_clip=10.0)[1] == pytest.approx(-12.4637, abs=1e-4)
    tokens, gradient = one_token(2.62, grad="naive", value_clip=10.0)
    assert (tokens.surrogate_BT.item(), bool(tokens.clipped_BT)) == (10.0, True)
    assert gradient == pytest.approx(1 - math.exp(2.62))
    assert one_token(2.62, grad="naive", value_clip=10.0, clip_grad="zero")[1] == 0.0
    assert one_token(2.60, grad="naive", value_clip=10.0, clip_grad="zero")[1] == pytest.approx(-12.4637, abs=1e-4)
    edge = math.log(11 + 2.610868638150)
    assert edge == pytest.approx(2.610868638150, abs=1e-9)
    assert math.exp(-edge) == pytest.approx(0.073470696587, abs=1e-9)


def test_a_clipped_log_ratio_bounds_value_and_gradient() -> None:
    for x in (199.0, -199.0):
        tokens, gradient = one_token(x, log_ratio_clip=20.0)
        assert bool(tokens.clipped_BT)
        assert tokens.surrogate_BT.item() == pytest.approx(math.expm1(math.copysign(20, x)) - math.copysign(20, x))
        assert gradient == pytest.approx(-math.copysign(20, x))
        assert one_token(x, log_ratio_clip=20.0, clip_grad="zero")[1] == 0.0


@pytest.mark.parametrize("grad", ["naive", "unbiased"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("estimator", SAMPLED)
@pytest.mark.parametrize(
    ("dtype", "logprob", "ref"), [(torch.float32, -200.0, -1.0), (torch.float16, -13.0, -1.0), (torch.float32, -1.0, -200.0)]
)
def test_a_token_far_from_the_reference_leaves_everything_finite(
    dtype: torch.dtype, logprob: float, ref: float, estimator: Estimator, direction: Direction, grad: str
) -> None:
    tokens, gradient = one_token(ref - logprob, dtype, logprob, estimator=estimator, direction=direction, grad=grad)
    assert math.isfinite(gradient)
    assert bool(torch.isfinite(tokens.surrogate_BT).all())
    assert bool(torch.isfinite(tokens.value_BT).all())


def test_small_log_ratios_keep_their_digits() -> None:
    """exp(x) - x - 1 in float32 is 0 or even negative at 1e-4; the truth is x^2 / 2 + x^3 / 6."""
    for x in (1e-6, -1e-6, 1e-4, -1e-4, 1e-3, 1.0, -1.0):
        got = kl_value(torch.zeros(1, dtype=torch.float64), torch.tensor([x], dtype=torch.float64), "k3").item()
        assert got == pytest.approx(math.expm1(x) - x if abs(x) > 0.01 else x**2 / 2 + x**3 / 6 + x**4 / 24, rel=1e-6)


@given(x=st.floats(-700, 700))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_k2_k3_and_abs_are_never_negative(direction: Direction, x: float) -> None:
    zero, ref = torch.zeros(1, dtype=torch.float64), torch.tensor([x], dtype=torch.float64)
    for estimator in ("k2", "k3", "abs"):
        assert kl_value(zero, ref, estimator, direction).item() >= 0  # type: ignore[arg-type]


@given(logits=st.lists(st.tuples(st.floats(-8, 8), st.floats(-8, 8)), min_size=2, max_size=8))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_k1_and_k3_average_to_the_exact_sum(direction: Direction, logits: list[tuple[float, float]]) -> None:
    pair = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    policy, ref = pair[:, 0], pair[:, 1]
    exact = exact_kl(policy[None], ref[None], direction).item()
    assert exact >= -1e-12
    for estimator in ("k1", "k3"):
        mean = float((policy.exp() * kl_value(policy, ref, estimator, direction)).sum())  # type: ignore[arg-type]
        assert mean == pytest.approx(exact, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", SAMPLED)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_policy_equal_to_its_reference_has_kl_zero_exactly(estimator: Estimator, direction: Direction, dtype: torch.dtype) -> None:
    logprob = -8 * torch.rand(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert not kl_value(logprob, logprob.clone(), estimator, direction).any()


@pytest.mark.parametrize("rubbish", [0.0, -200.0, 1e30, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("grad", ["naive", "unbiased"])
def test_masked_positions_can_hold_anything(rubbish: float, grad: str) -> None:
    def run(fill: float) -> tuple[torch.Tensor, torch.Tensor]:
        logprob = torch.tensor([[-1.0, fill, -2.0], [fill, fill, fill]], dtype=torch.float32, requires_grad=True)
        ref = torch.tensor([[-1.5, fill, -1.0], [fill, fill, fill]])
        mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
        cfg = KlConfig(grad=grad, importance="sampler", log_ratio_clip=None)  # type: ignore[arg-type]
        tokens = kl_loss_tokens(logprob, ref, ref, ref, mask, cfg)
        tokens.surrogate_BT.sum().backward()
        assert logprob.grad is not None
        assert not tokens.clipped_BT[mask == 0].any()
        return torch.cat([tokens.surrogate_BT.detach(), tokens.value_BT]), logprob.grad

    expected, got = run(-3.0), run(rubbish)
    torch.testing.assert_close(got[0], expected[0], atol=0, rtol=0)
    torch.testing.assert_close(got[1], expected[1], atol=0, rtol=0)


def test_temperature_must_be_the_same_on_both_sides() -> None:
    """The same logits [2, 1, 0, -1] at temperature 0.7 and 1: a KL of 0.0401 out of nothing, twice the usual target."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    hot, cold = torch.log_softmax(logits / 0.7, -1), torch.log_softmax(logits, -1)
    assert exact_kl(hot[None], cold[None]).item() == pytest.approx(0.040109624128, abs=1e-9)
    assert exact_kl(hot[None], hot[None]).item() == 0.0


def test_exact_kl_ignores_impossible_tokens() -> None:
    policy = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    ref = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    assert exact_kl(policy, ref).item() == pytest.approx(math.log(2))
    assert exact_kl(policy, policy, "jeffreys").item() == 0.0
    assert exact_kl(policy, ref, "ref_policy").item() == math.inf


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_exact_kl_in_chunks_is_the_same(direction: Direction) -> None:
    generator = torch.Generator().manual_seed(3)
    policy, ref = (torch.log_softmax(torch.randn(10, 50, generator=generator), -1) for _ in range(2))
    whole = exact_kl(policy, ref, direction)
    parts = torch.cat([exact_kl(policy[start : start + 3], ref[start : start + 3], direction) for start in range(0, 10, 3)])
    torch.testing.assert_close(parts, whole, atol=0, rtol=0)


def test_bf16_inputs_are_summed_in_float32() -> None:
    policy = torch.log_softmax(torch.randn(4, 1000, generator=torch.Generator().manual_seed(5)), -1)
    assert exact_kl(policy.bfloat16(), policy.bfloat16()).dtype == torch.float32
    assert not exact_kl(policy.bfloat16(), policy.bfloat16()).any()


def test_the_importance_weight_is_bounded_by_its_clip() -> None:
    logprob = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    old = torch.tensor([[-3.0, 0.0]], dtype=torch.float64)
    ref = torch.tensor([[-0.5, -0.5]], dtype=torch.float64)
    free = kl_loss_tokens(logprob, ref, old, None, torch.ones(1, 2), KlConfig()).surrogate_BT
    bound = kl_loss_tokens(logprob, ref, old, None, torch.ones(1, 2), KlConfig(importance_clip=2.0))
    assert (free[0, 0] / free[0, 1]).item() == pytest.approx(math.exp(3))
    assert (bound.surrogate_BT[0, 0] / bound.surrogate_BT[0, 1]).item() == pytest.approx(2.0)
    assert bound.clipped_BT.tolist() == [[True, False]]


def test_the_measured_value_is_neither_clipped_nor_weighted() -> None:
    """The beta rule reads the KL, not the loss term."""
    logprob = torch.tensor([[-5.0]], dtype=torch.float64)
    ref, old = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[-7.0]], dtype=torch.float64)
    tokens = kl_loss_tokens(logprob, ref, old, None, torch.ones(1, 1), KlConfig(value_clip=10.0))
    assert tokens.value_BT.item() == pytest.approx(math.expm1(4) - 4)
    assert tokens.surrogate_BT.item() == pytest.approx(10 * math.exp(2))
