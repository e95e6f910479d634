"""The policy-gradient term per token, and how per-token terms become one number.

Computes the clipped objective of GRPO and its relatives, and sums whose denominators are fixed for the whole step, so
that micro-batches, padding and ranks cannot change the result. Leaves out KL (kl.py) and beta (beta.py).

rho = pi_theta / pi_old of a token. `grpo`, `dr_grpo`, `dapo`, `bnpo`: -min(rho A, clip(rho, 1-eps, 1+eps_high) A)
(DeepSeekMath eq. 3); they differ in aggregation (dapo and bnpo share the token mean of the whole step: TRL's bnpo counts
the tokens of each micro-batch instead, which makes the result depend on the memory limit). `gspo`: the ratio of the whole
sequence, the geometric mean of its tokens' rho, with the gradient of each token on that token (GSPO-token, 2507.18071;
equal to GSPO when all tokens of a completion share one advantage). `cispo`: -sg(clip(rho)) A log pi_theta, no token loses
its gradient (2506.13585).

Shapes: B rows, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.contract.job import Aggregation, LossConfig


@dataclass(frozen=True)
class PolicyTokens:
    """The policy term, per token, before aggregation."""

    loss_BT: Tensor
    """float64, 0 where masked."""
    ratio_BT: Tensor
    """rho (for gspo the sequence's), detached; 1 where masked."""
    clipped_low_BT: Tensor
    """True where the clip at 1 - epsilon bounds the objective."""
    clipped_high_BT: Tensor
    """True where the clip at 1 + epsilon_high bounds the objective."""


def policy_loss_tokens(logprob_BT: Tensor, old_logprob_BT: Tensor, advantage: Tensor, mask_BT: Tensor, cfg: LossConfig) -> PolicyTokens:
    """The per-token loss to minimise. `advantage` is (B) or, with a KL penalty inside, (B, T).

    The gradient flows through `logprob_BT` only. Masked positions may hold anything, NaN included.
    """
    mask_BT = mask_BT.bool()
    logprob_BT = logprob_BT.double().where(mask_BT, 0.0)
    old_logprob_BT = old_logprob_BT.detach().double().where(mask_BT, 0.0)
    advantage = advantage.detach().double()
    advantage_BT = (advantage[:, None] if advantage.dim() == 1 else advantage).expand_as(logprob_BT).where(mask_BT, 0.0)
    low = 1 - cfg.epsilon
    high = 1 + (cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high)

    ratio_BT = _ratio(logprob_BT, old_logprob_BT, mask_BT, is_sequence=cfg.type == "gspo")
    clipped_ratio_BT = ratio_BT.clamp(low, high)
    is_low_BT, is_high_BT = ratio_BT.detach() < low, ratio_BT.detach() > high
    if cfg.type == "cispo":
        loss_BT = -clipped_ratio_BT.detach() * advantage_BT * logprob_BT
    else:
        loss_BT = -torch.minimum(ratio_BT * advantage_BT, clipped_ratio_BT * advantage_BT)
        is_low_BT, is_high_BT = is_low_BT & (advantage_BT < 0), is_high_BT & (advantage_BT > 0)
    return PolicyTokens(
        loss_BT=loss_BT.where(mask_BT, 0.0),
        ratio_BT=ratio_BT.detach().where(mask_BT, 1.0),
        clipped_low_BT=is_low_BT & mask_BT,
        clipped_high_BT=is_high_BT & mask_BT,
    )


def _ratio(logprob_BT: Tensor, old_logprob_BT: Tensor, mask_BT: Tensor, *, is_sequence: bool) -> Tensor:
    log_ratio_BT = logprob_BT - old_logprob_BT
    if not is_sequence:
        return log_ratio_BT.exp()
    mean_B = log_ratio_BT.detach().sum(-1) / mask_BT.sum(-1).clamp(min=1)
    return (mean_B[:, None] + logprob_BT - logprob_BT.detach()).exp()


@dataclass(frozen=True)
class Normaliser:
    """The denominators of a whole step, fixed before its micro-batches are cut.

    Over several ranks: sum `num_tokens` and `num_sequences` over the ranks, build the normaliser from the totals, and
    sum (not average) the gradients.
    """

    aggregation: Aggregation
    num_tokens: int
    num_sequences: int
    """Rows with at least one unmasked token: a fully masked row does not count as a zero."""
    max_completion_tokens: int

    @classmethod
    def create(cls, mask_BT: Tensor, aggregation: Aggregation, max_completion_tokens: int) -> Normaliser:
        """From the mask of every row of the step."""
        mask_BT = mask_BT.bool()
        return cls(aggregation, int(mask_BT.sum()), int(mask_BT.any(-1).sum()), max_completion_tokens)


def aggregate(per_token_BT: Tensor, mask_BT: Tensor, normaliser: Normaliser) -> Tensor:
    """This micro-batch's share of the step's value; the shares of all whole-row micro-batches add up to it.

    `token_mean`: sum / tokens (DAPO). `seq_mean_token_mean`: mean over rows of the row's mean (DeepSeekMath).
    `seq_sum`: mean over rows of the row's sum. `constant`: sum / (rows * max_completion_tokens) (Dr. GRPO).
    0 with zero gradients when nothing is unmasked.
    """
    mask_BT = mask_BT.bool()
    per_token_BT = per_token_BT.double().where(mask_BT, 0.0)
    tokens, sequences = max(normaliser.num_tokens, 1), max(normaliser.num_sequences, 1)
    match normaliser.aggregation:
        case "token_mean":
            return per_token_BT.sum() / tokens
        case "seq_mean_token_mean":
            return (per_token_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)).sum() / sequences
        case "seq_sum":
            return per_token_BT.sum() / sequences
        case "constant":
            return per_token_BT.sum() / (sequences * normaliser.max_completion_tokens)
