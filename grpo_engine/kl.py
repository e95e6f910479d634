"""The KL divergence per token: its value, its gradient, and where it enters training.

Computes, for sampled tokens, the estimators k1, k2, k3, abs and the exact sum over the vocabulary, in three directions,
with a gradient that is stated for each. Leaves out: aggregation over tokens (loss.py), beta (beta.py), and anything
that needs a model.

Notation. x = logprob_ref - logprob_policy, r = exp(x) = pi_ref / pi_theta, w = importance weight (detached).
All arithmetic is done in float64 whatever the dtype of the log-probabilities: B*T numbers are nothing beside B*T*V
logits, and exp(x) - x - 1 loses every digit of float32 near x = 0. Samples come from the policy (or are weighted by w),
so an expectation under the reference carries the factor r.

| direction                        | k1        | k2         | k3                | abs       | unbiased gradient coefficient |
|----------------------------------|-----------|------------|-------------------|-----------|-------------------------------|
| policy_ref = KL(theta || ref)    | -x        | x^2/2      | r - 1 - x         | |x|       | w * (-x)                      |
| ref_policy = KL(ref || theta)    | r x       | r x^2/2    | r x - r + 1       | r |x|     | w * (1 - r)                   |
| jeffreys   = the sum of both     | (r - 1) x | (1+r)x^2/2 | (r - 1) x         | (1+r)|x|  | w * (1 - r - x)               |

The coefficient multiplies the gradient of log pi_theta of the sampled token. `unbiased` uses it under every estimator:
it is the gradient of w*k3 with the gradient taken through w (DeepSeek-V3.2), and of sg(w)*k2. `naive` is autograd
through the estimator itself with w detached (DeepSeekMath eq. 21): for k3 on-policy that is the gradient of the
*other* divergence, KL(ref || theta); for k1 it is zero in expectation.

Shapes: B rows, T completion tokens, N flat positions, V vocabulary. Units: nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_engine.contract.kl import Direction, Estimator, KlConfig


class _ToDouble(torch.autograd.Function):
    """float64 on the way in; on the way back the gradient saturates at the input dtype's range instead of overflowing.

    1 - exp(12) does not fit into float16, which a half-precision leaf would turn into an infinite gradient.
    """

    @staticmethod
    def forward(ctx: Any, logprob: Tensor) -> Tensor:
        ctx.dtype = logprob.dtype
        return logprob.double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        limit = torch.finfo(ctx.dtype).max
        return gradient.clamp(-limit, limit).to(ctx.dtype)


def _to_double(logprob: Tensor) -> Tensor:
    widened: Tensor = _ToDouble.apply(logprob)  # type: ignore[no-untyped-call]
    return widened


@dataclass(frozen=True)
class ExactKl:
    """The KL of every position, summed over the vocabulary. `value_BT` carries its gradient when one is wanted."""

    value_BT: Tensor


@dataclass(frozen=True)
class KlTokens:
    """The KL term of the loss, per token, before beta and before aggregation."""

    surrogate_BT: Tensor
    """Value: w * (clipped estimate). Gradient: as the configuration says. 0 where masked. float64."""
    value_BT: Tensor
    """The estimate itself: unclipped, unweighted, detached. What telemetry and the beta rule read. 0 where masked."""
    clipped_BT: Tensor
    """True where the log-ratio, the value or the importance weight was clipped."""


def kl_value(logprob: Tensor, ref_logprob: Tensor, estimator: Estimator, direction: Direction = "policy_ref") -> Tensor:
    """The per-token estimate in float64, for any shape, from log-probabilities of tokens sampled from the policy.

    Differentiable; its autograd is the `naive` gradient. Raises ValueError for `exact`, which needs the whole vocabulary.
    """
    return _value(_to_double(ref_logprob) - _to_double(logprob), estimator, direction)


def _value(x: Tensor, estimator: Estimator, direction: Direction) -> Tensor:
    if estimator == "exact":
        raise ValueError("estimator exact needs the log-probabilities of the whole vocabulary; use exact_kl")
    if direction == "jeffreys" and estimator in ("k1", "k3"):
        return x * torch.expm1(x)
    match estimator:
        case "k1":
            policy_ref, under_ref = -x, x
        case "k2":
            policy_ref = under_ref = x.square() / 2
        case "k3":
            policy_ref, under_ref = torch.expm1(x) - x, torch.expm1(-x) + x
        case "abs":
            policy_ref = under_ref = x.abs()
    if direction == "policy_ref":
        return policy_ref
    ref_policy = x.exp() * under_ref
    return ref_policy if direction == "ref_policy" else policy_ref + ref_policy


def _unbiased_surrogate(x: Tensor, direction: Direction) -> Tensor:
    """A function of x whose derivative with respect to log pi_theta is the table's coefficient (without w)."""
    match direction:
        case "policy_ref":
            return x.square() / 2
        case "ref_policy":
            return torch.expm1(x) - x
        case "jeffreys":
            return x.square() / 2 + torch.expm1(x) - x


def exact_kl(logprobs_policy_NV: Tensor, logprobs_ref_NV: Tensor, direction: Direction = "policy_ref") -> Tensor:
    """The divergence between two categorical distributions, summed over V. Float32 or the inputs' wider type.

    Its autograd is the exact gradient. Tokens with probability 0 under the weighting distribution contribute 0.
    """
    dtype = torch.promote_types(torch.promote_types(logprobs_policy_NV.dtype, logprobs_ref_NV.dtype), torch.float32)
    policy_NV, ref_NV = logprobs_policy_NV.to(dtype), logprobs_ref_NV.to(dtype)
    match direction:
        case "policy_ref":
            return _expected_log_ratio(policy_NV, ref_NV)
        case "ref_policy":
            return _expected_log_ratio(ref_NV, policy_NV)
        case "jeffreys":
            return _expected_log_ratio(policy_NV, ref_NV) + _expected_log_ratio(ref_NV, policy_NV)


def _expected_log_ratio(left_NV: Tensor, right_NV: Tensor) -> Tensor:
    possible_NV = left_NV > -torch.inf
    left_NV, right_NV = left_NV.where(possible_NV, 0.0), right_NV.where(possible_NV, 0.0)
    return (left_NV.exp() * (left_NV - right_NV)).where(possible_NV, 0.0).sum(-1)


def importance_weight(logprob: Tensor, old_logprob: Tensor, sampler_logprob: Tensor | None, cfg: KlConfig) -> Tensor:
    """w, detached, float64, before its clip: 1, pi_theta/pi_old or pi_theta/pi_sampler. Always per token (never per sequence)."""
    logprob = logprob.detach().double()
    match cfg.importance:
        case "none":
            return torch.ones_like(logprob)
        case "old":
            return (logprob - old_logprob.detach().double()).exp()
        case "sampler":
            if sampler_logprob is None:
                raise ValueError("importance sampler needs the sampler's log-probabilities")
            return (logprob - sampler_logprob.detach().double()).exp()


def kl_loss_tokens(
    logprob_BT: Tensor,
    ref_logprob_BT: Tensor,
    old_logprob_BT: Tensor,
    sampler_logprob_BT: Tensor | None,
    mask_BT: Tensor,
    cfg: KlConfig,
    exact: ExactKl | None = None,
) -> KlTokens:
    """The KL term for placement `loss`: multiply `surrogate_BT` by beta, aggregate, differentiate.

    Masked positions never reach an exponential, so their content (even NaN) changes neither values nor gradients.
    A clipped log-ratio under `straight_through` has the gradient taken at the clipped ratio (finite whatever the policy
    does); a clipped value keeps the gradient of the unclipped one. Under `zero` a clipped token has no gradient.
    Clipping the weight bounds it and leaves the gradient otherwise alone.
    """
    if cfg.placement != "loss":
        raise ValueError(f"placement {cfg.placement} has no loss term; use kl_penalty")
    mask_BT = mask_BT.bool()
    if cfg.estimator == "exact":
        if exact is None:
            raise ValueError("estimator exact needs the exact KL of every position")
        return _exact_tokens(exact, mask_BT, cfg)
    logprob_BT = _to_double(logprob_BT).where(mask_BT, 0.0)
    x_BT = ref_logprob_BT.detach().double().where(mask_BT, 0.0) - logprob_BT
    w_BT = importance_weight(logprob_BT, _masked(old_logprob_BT, mask_BT), _masked(sampler_logprob_BT, mask_BT), cfg)
    raw_BT = _value(x_BT.detach(), cfg.estimator, cfg.direction)

    clipped_BT = torch.zeros_like(mask_BT)
    if cfg.log_ratio_clip is not None:
        clipped_BT = x_BT.detach().abs() > cfg.log_ratio_clip
        x_BT = x_BT.detach().clamp(-cfg.log_ratio_clip, cfg.log_ratio_clip) - (logprob_BT - logprob_BT.detach())
    value_BT = _value(x_BT, cfg.estimator, cfg.direction)
    slope_BT = value_BT if cfg.grad == "naive" else _unbiased_surrogate(x_BT, cfg.direction)
    surrogate_BT, clipped_BT = _clip_value(value_BT.detach(), slope_BT, clipped_BT, cfg)
    if cfg.importance_clip is not None:
        clipped_BT = clipped_BT | (w_BT > cfg.importance_clip)
        w_BT = w_BT.clamp(max=cfg.importance_clip)
    return KlTokens(
        surrogate_BT=(w_BT * surrogate_BT).where(mask_BT, 0.0),
        value_BT=raw_BT.where(mask_BT, 0.0),
        clipped_BT=clipped_BT & mask_BT,
    )


def _exact_tokens(exact: ExactKl, mask_BT: Tensor, cfg: KlConfig) -> KlTokens:
    value_BT = exact.value_BT.double().where(mask_BT, 0.0)
    surrogate_BT, clipped_BT = _clip_value(value_BT.detach(), value_BT, torch.zeros_like(mask_BT), cfg)
    return KlTokens(surrogate_BT=surrogate_BT.where(mask_BT, 0.0), value_BT=value_BT.detach(), clipped_BT=clipped_BT & mask_BT)


def _clip_value(value_BT: Tensor, slope_BT: Tensor, clipped_BT: Tensor, cfg: KlConfig) -> tuple[Tensor, Tensor]:
    """The clipped value carrying the gradient of `slope_BT`, and where anything was clipped so far."""
    if cfg.value_clip is not None:
        clipped_BT = clipped_BT | (value_BT > cfg.value_clip)
        value_BT = value_BT.clamp(max=cfg.value_clip)
    gradient_BT = slope_BT - slope_BT.detach()
    if cfg.clip_grad == "zero":
        gradient_BT = gradient_BT.where(~clipped_BT, 0.0)
    return value_BT + gradient_BT, clipped_BT


def _masked(logprob_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    if logprob_BT is None:
        return torch.zeros_like(mask_BT, dtype=torch.float64)
    return logprob_BT.detach().double().where(mask_BT, 0.0)


@dataclass(frozen=True)
class KlPenalty:
    """The KL term for placement `reward` or `advantage`: subtract beta * `penalty_BT` from the per-token advantage."""

    penalty_BT: Tensor
    """Detached, float64, 0 where masked."""
    value_BT: Tensor
    """The unclipped k1, as in KlTokens."""
    clipped_BT: Tensor


def kl_penalty(old_logprob_BT: Tensor, ref_logprob_BT: Tensor, mask_BT: Tensor, cfg: KlConfig) -> KlPenalty:
    """k1 of the rollout as a cost, summed over the tokens still to come with `cfg.discount`.

    `reward`: the discounted sum itself (RLHF-PPO: -beta * k1 is each token's reward; DeepSeekMath eq. 2). At discount 1
    its policy gradient is the full gradient of the sequence-level KL. `advantage`: the same less its mean over the
    batch's tokens, a baseline (Tinker cookbook at discount 0). To be added after group normalisation: inside it, the
    group's standard deviation would cancel beta.
    """
    if cfg.placement == "loss":
        raise ValueError("placement loss has no penalty; use kl_loss_tokens")
    mask_BT = mask_BT.bool()
    x_BT = _masked(ref_logprob_BT, mask_BT) - _masked(old_logprob_BT, mask_BT)
    cost_BT, clipped_BT = -x_BT, torch.zeros_like(mask_BT)
    if cfg.log_ratio_clip is not None:
        clipped_BT = x_BT.abs() > cfg.log_ratio_clip
        cost_BT = cost_BT.clamp(-cfg.log_ratio_clip, cfg.log_ratio_clip)
    if cfg.value_clip is not None:
        clipped_BT = clipped_BT | (cost_BT > cfg.value_clip)
        cost_BT = cost_BT.clamp(max=cfg.value_clip)
    penalty_BT = reward_to_go_BT(cost_BT, mask_BT, cfg.discount)
    if cfg.placement == "advantage":
        penalty_BT = (penalty_BT - penalty_BT.sum() / mask_BT.sum().clamp(min=1)).where(mask_BT, 0.0)
    return KlPenalty(penalty_BT=penalty_BT, value_BT=-x_BT, clipped_BT=clipped_BT & mask_BT)


def reward_to_go_BT(value_BT: Tensor, mask_BT: Tensor, discount: float) -> Tensor:
    """Sum over s >= t of discount^(s-t) * value_s, over unmasked s; 0 where masked."""
    mask_BT = mask_BT.bool()
    value_BT = value_BT.where(mask_BT, 0.0)
    if discount == 0:
        return value_BT
    if discount == 1:
        return value_BT.flip(-1).cumsum(-1).flip(-1).where(mask_BT, 0.0)
    running_B = torch.zeros_like(value_BT[:, 0])
    columns = []
    for value_B in reversed(value_BT.unbind(-1)):
        running_B = value_B + discount * running_B
        columns.append(running_B)
    return torch.stack(columns[::-1], dim=-1).where(mask_BT, 0.0)


def kl_statistics(value_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """What telemetry reports of a whole step: empty when every token is masked.

    `mean`, `se` (ddof 1) and `token_max` are over tokens; `p50`, `p95` and `max` over completions of their own token
    means; `per_sequence_mean` is the mean over completions of the sum over tokens. Fully masked rows do not count.
    """
    mask_BT = mask_BT.bool()
    value_BT = value_BT.detach().double().where(mask_BT, 0.0)
    length_B = mask_BT.sum(-1)
    if not bool(mask_BT.any()):
        return {}
    token_N = value_BT[mask_BT]
    sum_B = value_BT.sum(-1)[length_B > 0]
    mean_B = sum_B / length_B[length_B > 0]
    count = token_N.numel()
    p50, p95 = torch.quantile(mean_B, torch.tensor([0.5, 0.95], dtype=torch.float64, device=mean_B.device)).tolist()
    return {
        "mean": token_N.mean().item(),
        "se": (token_N.std(correction=1) / count**0.5).item() if count > 1 else 0.0,
        "p50": p50,
        "p95": p95,
        "max": mean_B.max().item(),
        "token_max": token_N.max().item(),
        "per_sequence_mean": sum_B.mean().item(),
    }
