"""Exact expectations over a four-token vocabulary: every sampled token once, weighted by its probability.

The anchors A and B are derived by hand in float64: with p the policy and q the reference,
KL(p || q) = sum p log(p/q) and d KL / d logit_v = p_v (log(p_v/q_v) - KL(p || q)); d KL(q || p) / d logit_v = p_v - q_v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.contract.kl import KlConfig
from grpo_engine.kl import ExactKl, exact_kl, kl_loss_tokens, kl_penalty


@dataclass(frozen=True)
class Case:
    """A policy and a reference over four tokens."""

    policy: list[float]
    reference: list[float]

    @property
    def logits(self) -> Tensor:
        return torch.tensor(self.policy, dtype=torch.float64).log()

    @property
    def ref_logprob_V(self) -> Tensor:
        return torch.tensor(self.reference, dtype=torch.float64).log()


A = Case([0.5, 0.25, 0.15, 0.10], [0.4, 0.3, 0.2, 0.1])
B = Case([0.70, 0.20, 0.09, 0.01], [0.25] * 4)
OFF_POLICY = [0.3, 0.3, 0.2, 0.2]
"""A sampling distribution that is neither policy nor reference."""


def column(values: Tensor) -> Tensor:
    """(V) as V rows of one token."""
    return values[:, None]


def expected_gradient(
    case: Case, cfg: KlConfig, sampled_from: list[float] | None = None, *, is_sampler: bool = False, logits: Tensor | None = None
) -> Tensor:
    """Gradient with respect to the logits of E[surrogate], tokens sampled from `sampled_from` (the policy when None)."""
    logits = (case.logits if logits is None else logits).clone().requires_grad_()
    logprob_V = torch.log_softmax(logits, -1)
    weight_V = logprob_V.detach().exp() if sampled_from is None else torch.tensor(sampled_from, dtype=torch.float64)
    behind_BT = column(logprob_V.detach() if sampled_from is None else weight_V.log())
    exact = None
    if cfg.estimator == "exact":
        value = exact_kl(logprob_V[None], case.ref_logprob_V[None], cfg.direction)
        exact = ExactKl(value.expand(4)[:, None])
    tokens = kl_loss_tokens(
        column(logprob_V),
        column(case.ref_logprob_V),
        column(logprob_V.detach()) if is_sampler else behind_BT,
        behind_BT if is_sampler else None,
        torch.ones(4, 1),
        cfg,
        exact,
    )
    (weight_V * tokens.surrogate_BT[:, 0]).sum().backward()
    assert logits.grad is not None
    return logits.grad


def expected_value(case: Case, cfg: KlConfig, sampled_from: list[float] | None = None) -> float:
    """E[surrogate] under the sampling distribution."""
    logprob_V = torch.log_softmax(case.logits, -1)
    weight_V = logprob_V.exp() if sampled_from is None else torch.tensor(sampled_from, dtype=torch.float64)
    tokens = kl_loss_tokens(column(logprob_V), column(case.ref_logprob_V), column(weight_V.log()), None, torch.ones(4, 1), cfg)
    return float((weight_V * tokens.surrogate_BT[:, 0]).sum())


def penalty_gradient(case: Case, cfg: KlConfig) -> Tensor:
    """Gradient of the loss -E[A log p] when the only reward is minus the KL penalty."""
    logits = case.logits.clone().requires_grad_()
    logprob_V = torch.log_softmax(logits, -1)
    penalty_V = kl_penalty(column(logprob_V.detach()), column(case.ref_logprob_V), torch.ones(4, 1), cfg).penalty_BT[:, 0]
    (logprob_V.detach().exp() * penalty_V * logprob_V).sum().backward()
    assert logits.grad is not None
    return logits.grad


def finite_difference(function: Callable[[Tensor], Tensor], point: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences of a scalar function."""
    gradient = torch.zeros_like(point)
    for index in range(point.numel()):
        shift = torch.zeros_like(point)
        shift.view(-1)[index] = step
        gradient.view(-1)[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return gradient
