"""The gradient of every estimator, as exact expectations over the vocabulary: which divergence is really descended.

KL(theta || ref) has gradient RKL, KL(ref || theta) has gradient FKL = p - q, both with respect to the logits.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_engine.contract.kl import Estimator, KlConfig
from grpo_engine.kl import exact_kl, kl_loss_tokens, kl_penalty, reward_to_go_BT
from tests.golden.enumeration import OFF_POLICY, A, B, Case, expected_gradient, finite_difference, penalty_gradient

RKL = {
    "A": [0.100152237862, -0.051290158096, -0.046578172206, -0.002283907559],
    "B": [0.334356334161, -0.155022212510, -0.141625688289, -0.037708433361],
}
FKL = {"A": [0.1, -0.05, -0.05, 0.0], "B": [0.45, -0.05, -0.16, -0.24]}
ABS = {"A": [0.45, -0.275, -0.165, -0.01], "B": [0.42, -0.28, -0.126, -0.014]}
RHO_K2 = {
    "A": [0.101195259988, -0.052837633835, -0.043792670795, -0.004564955358],
    "B": [0.373040155620, -0.245002002068, -0.137387573371, 0.009349419818],
}
K3_IN_REWARD = {
    "A": [0.000152237862, -0.001290158096, 0.003421827794, -0.002283907559],
    "B": [-0.115643665839, -0.105022212510, 0.018374311711, 0.202291566639],
}
CASES = {"A": A, "B": B}
SAMPLED: tuple[Estimator, ...] = ("k1", "k2", "k3", "abs")


def config(**settings: Any) -> KlConfig:
    return KlConfig(**settings, allow_biased=True)


def close(got: torch.Tensor, expected: list[float], tolerance: float = 1e-9) -> None:
    assert got.tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("estimator", SAMPLED)
@pytest.mark.parametrize("sampled_from", [None, OFF_POLICY])
def test_unbiased_descends_reverse_kl_under_every_estimator(name: str, estimator: Estimator, sampled_from: list[float] | None) -> None:
    close(expected_gradient(CASES[name], config(estimator=estimator), sampled_from), RKL[name])


@pytest.mark.parametrize("name", CASES)
def test_unbiased_with_the_samplers_weight(name: str) -> None:
    cfg = config(importance="sampler")
    close(expected_gradient(CASES[name], cfg, OFF_POLICY, is_sampler=True), RKL[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sampled_from", [None, OFF_POLICY])
def test_unbiased_in_the_other_directions(name: str, sampled_from: list[float] | None) -> None:
    close(expected_gradient(CASES[name], config(direction="ref_policy"), sampled_from), FKL[name])
    both = [left + right for left, right in zip(RKL[name], FKL[name], strict=True)]
    close(expected_gradient(CASES[name], config(direction="jeffreys"), sampled_from), both)


@pytest.mark.parametrize("name", CASES)
def test_naive_on_policy(name: str) -> None:
    case = CASES[name]
    close(expected_gradient(case, config(estimator="k1", grad="naive")), [0.0] * 4)
    close(expected_gradient(case, config(estimator="k2", grad="naive")), RKL[name])
    close(expected_gradient(case, config(estimator="k3", grad="naive")), FKL[name])
    close(expected_gradient(case, config(estimator="abs", grad="naive")), ABS[name])


def test_a_detached_weight_does_not_repair_naive_k3() -> None:
    close(expected_gradient(A, config(grad="naive", importance="old"), OFF_POLICY), FKL["A"])
    close(
        expected_gradient(A, config(grad="naive", importance="none"), OFF_POLICY),
        [0.093333333333, -0.043333333333, -0.056666666667, 0.006666666667],
    )


@pytest.mark.parametrize("name", CASES)
def test_the_unbiased_gradient_is_that_of_rho_k3_through_rho(name: str) -> None:
    """Token by token, not only in expectation: rho * k3 differentiated through rho gives rho * k1."""
    case = CASES[name]
    logprob_V = case.logits.clone().requires_grad_()
    old_V = torch.tensor(OFF_POLICY, dtype=torch.float64).log()
    x_V = case.ref_logprob_V - logprob_V
    ((logprob_V - old_V).exp() * (torch.expm1(x_V) - x_V)).sum().backward()
    ours_V = case.logits.clone().requires_grad_()
    kl_loss_tokens(
        ours_V[:, None], case.ref_logprob_V[:, None], old_V[:, None], None, torch.ones(4, 1), KlConfig()
    ).surrogate_BT.sum().backward()
    torch.testing.assert_close(ours_V.grad, logprob_V.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_differentiating_the_expectation_of_k2_is_another_objective(name: str) -> None:
    """rho * k2 with the gradient through rho, as one peer does, is the gradient of E[k2], not of the KL."""
    case = CASES[name]

    def expected_k2(logits: torch.Tensor) -> torch.Tensor:
        logprob_V = torch.log_softmax(logits, -1)
        return (logprob_V.exp() * (case.ref_logprob_V - logprob_V).square() / 2).sum()

    logits = case.logits.clone().requires_grad_()
    expected_k2(logits).backward()
    assert logits.grad is not None
    close(logits.grad, RHO_K2[name])
    assert (expected_gradient(case, config(estimator="k2")) - logits.grad).abs().max() > 1e-4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_k1_in_reward_or_advantage_descends_reverse_kl(name: str, placement: str) -> None:
    close(penalty_gradient(CASES[name], config(estimator="k1", placement=placement)), RKL[name])


@pytest.mark.parametrize("name", CASES)
def test_k3_in_the_reward_pushes_the_wrong_way(name: str) -> None:
    """Why k3 in the reward is refused: its gradient is RKL - FKL, of the wrong sign on the most over-used token of case B."""
    case = CASES[name]
    logits = case.logits.clone().requires_grad_()
    logprob_V = torch.log_softmax(logits, -1)
    x_V = case.ref_logprob_V - logprob_V.detach()
    (logprob_V.detach().exp() * (torch.expm1(x_V) - x_V) * logprob_V).sum().backward()
    assert logits.grad is not None
    close(logits.grad, K3_IN_REWARD[name])
    close(logits.grad, [left - right for left, right in zip(RKL[name], FKL[name], strict=True)])


@pytest.mark.parametrize("name", CASES)
def test_exact_has_the_exact_gradient(name: str) -> None:
    case = CASES[name]
    both = [left + right for left, right in zip(RKL[name], FKL[name], strict=True)]
    for direction, expected in (("policy_ref", RKL[name]), ("ref_policy", FKL[name]), ("jeffreys", both)):
        close(expected_gradient(case, KlConfig(estimator="exact", direction=direction)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_anchors_agree_with_finite_differences(name: str) -> None:
    case = CASES[name]

    def divergence(logits: torch.Tensor) -> torch.Tensor:
        return exact_kl(torch.log_softmax(logits, -1)[None], case.ref_logprob_V[None]).sum()

    close(finite_difference(divergence, case.logits), RKL[name], 1e-8)


def test_deepseekmath_equation_21() -> None:
    """Gradient coefficient A + beta (pi_ref/pi_theta - 1) at log p = -1.2, log q = -0.9, A = 1.5, beta = 0.04."""
    logprob = torch.tensor([[-1.2]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-0.9]], dtype=torch.float64)
    cfg = KlConfig(grad="naive", importance="none")
    tokens = kl_loss_tokens(logprob, ref, logprob.detach(), None, torch.ones(1, 1), cfg)
    assert tokens.value_BT.item() == pytest.approx(0.049858807576, abs=1e-9)
    (-1.5 * logprob + 0.04 * tokens.surrogate_BT).sum().backward()
    assert logprob.grad is not None
    assert -logprob.grad.item() == pytest.approx(1.513994352303, abs=1e-9)


class TestBandit:
    """Rewards [1, 0, 0], reference [.2, .3, .5], beta .5: each gradient form has its own optimum."""

    case = Case([1 / 3] * 3, [0.2, 0.3, 0.5])
    reward_V = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    def climb(self, cfg: KlConfig, steps: int = 3000, rate: float = 1.0) -> list[float]:
        logits = self.case.logits.clone()
        for _ in range(steps):
            probability_V = torch.softmax(logits, -1)
            reward_gradient = probability_V * (self.reward_V - (probability_V * self.reward_V).sum())
            logits = logits + rate * (reward_gradient - 0.5 * self.kl_gradient(cfg, logits))
        return [float(value) for value in torch.softmax(logits, -1)]

    def kl_gradient(self, cfg: KlConfig, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone().requires_grad_()
        logprob_V = torch.log_softmax(logits, -1)
        behind = logprob_V.detach()[:, None]
        tokens = kl_loss_tokens(logprob_V[:, None], self.case.ref_logprob_V[:, None], behind, None, torch.ones(3, 1), cfg)
        (logprob_V.detach().exp() * tokens.surrogate_BT[:, 0]).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def test_unbiased_reaches_the_optimum_of_reverse_kl(self) -> None:
        optimum = [0.648785644284, 0.131705383394, 0.219508972323]
        assert self.climb(KlConfig()) == pytest.approx(optimum, abs=1e-9)
        assert optimum == pytest.approx(
            [q * math.exp(r / 0.5) / 2.277811 for q, r in zip([0.2, 0.3, 0.5], [1, 0, 0], strict=True)], abs=1e-5
        )

    def test_naive_k3_reaches_another_point(self) -> None:
        assert self.climb(KlConfig(grad="naive")) == pytest.approx([0.653112887415, 0.130082667219, 0.216804445366], abs=1e-9)

    def test_naive_k1_ignores_the_reference(self) -> None:
        assert self.climb(config(estimator="k1", grad="naive"), steps=5000, rate=3.0)[0] > 0.9999


class TestTwoStepChain:
    """A binary choice, then another that depends on it: the tokenwise gradient misses the KL that a token leads to."""

    point = torch.tensor([0.8, -0.5, 1.0], dtype=torch.float64)
    log_half = math.log(0.5)

    def paths(self, logits: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probabilities of both tokens on each of the four paths; index 1 is the token whose logit is given."""
        first = torch.stack([torch.nn.functional.logsigmoid(-logits[0]), torch.nn.functional.logsigmoid(logits[0])])
        second = [
            torch.stack([torch.nn.functional.logsigmoid(-logits[1]), torch.nn.functional.logsigmoid(logits[1])]),
            torch.stack([torch.nn.functional.logsigmoid(-logits[2]), torch.nn.functional.logsigmoid(logits[2])]),
        ]
        return [(first[a], second[a][b]) for a in range(2) for b in range(2)]

    def sequence_kl(self, logits: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one, two in self.paths(logits):
            total = total + (one + two).exp() * (one + two - 2 * self.log_half)
        return total

    def gradient(self, cfg: KlConfig) -> torch.Tensor:
        logits = self.point.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        reference = torch.full((1, 2), self.log_half, dtype=torch.float64)
        for one, two in self.paths(logits):
            logprob_BT = torch.stack([one, two])[None]
            weight = (one + two).detach().exp()
            if cfg.placement == "loss":
                tokens = kl_loss_tokens(logprob_BT, reference, logprob_BT.detach(), None, torch.ones(1, 2), cfg)
                total = total + weight * tokens.surrogate_BT.sum()
            else:
                penalty = kl_penalty(logprob_BT.detach(), reference, torch.ones(1, 2), cfg).penalty_BT
                total = total + weight * (penalty * logprob_BT).sum()
        total.backward()
        assert logits.grad is not None
        return logits.grad

    def test_the_kl_of_the_sequence(self) -> None:
        assert self.sequence_kl(self.point).item() == pytest.approx(0.159968408232, abs=1e-9)

    def test_reward_to_go_is_the_full_gradient(self) -> None:
        full = [0.188378335637, -0.036428573906, 0.135657216622]
        close(finite_difference(self.sequence_kl, self.point), full, 1e-8)
        close(self.gradient(KlConfig(estimator="k1", placement="reward", discount=1.0)), full)

    def test_tokenwise_is_a_part_of_it(self) -> None:
        partial = [0.171127757216, -0.036428573906, 0.135657216622]
        close(self.gradient(KlConfig()), partial)
        close(self.gradient(KlConfig(estimator="k1", placement="reward", discount=0.0)), partial)

    def test_naive_k3_is_neither(self) -> None:
        close(self.gradient(KlConfig(grad="naive")), [0.189974481128, -0.037965517697, 0.159424522900])


def test_reward_to_go_skips_masked_tokens() -> None:
    value = torch.tensor([[1.0, 2.0, 4.0, float("nan")]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 0]])
    assert reward_to_go_BT(value, mask, 1.0).tolist() == [[5.0, 0.0, 4.0, 0.0]]
    assert reward_to_go_BT(value, mask, 0.5).tolist() == [[2.0, 0.0, 4.0, 0.0]]
    assert reward_to_go_BT(value, mask, 0.0).tolist() == [[1.0, 0.0, 4.0, 0.0]]
