"""Group-relative advantages: rewards in, one number per completion out.

Computes A = (R - mean of the group) / (standard deviation + eps) in float64 (DeepSeekMath section 4.1.2), with the
deviation of the group, of the batch, or none (Dr. GRPO). Leaves out the KL penalty, which is added afterwards
(kl.kl_penalty): inside the normalisation the deviation would cancel beta.

A group whose rewards are equal up to rounding has advantage exactly 0. Without that, float noise of 1e-17 divided by
itself becomes an advantage of order 1.

Shapes: P prompts, G completions of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.contract.job import LossConfig

RELATIVE_TOLERANCE = 1e-6
"""Rewards closer than this share of the largest |reward| count as equal (float32 graders differ in the last bit)."""
ABSOLUTE_TOLERANCE = 1e-12


class NonFiniteRewards(ValueError):
    """A reward is infinite, or no completion has one; the caller must quarantine the step before it asks for advantages."""


@dataclass(frozen=True)
class Advantages:
    """Advantages and which completions take part in which term."""

    advantage_PG: Tensor
    """float64; exactly 0 in groups whose rewards are equal."""
    is_zero_std_P: Tensor
    """True for groups whose rewards are all equal."""
    std_P: Tensor
    """Standard deviation of each group's rewards (`ddof` as configured), for telemetry."""
    policy_keep_PG: Tensor
    """Completions that count in the policy term, numerator and denominator alike."""
    kl_keep_PG: Tensor
    """Completions that count in the KL term."""


def group_advantages(reward_PG: Tensor, cfg: LossConfig, is_truncated_PG: Tensor | None = None) -> Advantages:
    """Advantages of a step. `is_truncated_PG` is needed when `cfg.mask_truncated` is set.

    A reward of NaN says that the completion could not be graded: it is left out of its group's statistics and of both terms.
    A group with fewer than two grades has nothing to compare and counts as one of equal rewards.
    `zero_std_groups`: `keep` leaves a group of equal rewards in both terms (advantage 0, KL gradient alive),
    `mask_policy` takes it out of the policy term's denominator, `drop_all` out of both terms.
    Raises NonFiniteRewards.
    """
    reward_PG = reward_PG.detach().double()
    is_graded_PG = ~reward_PG.isnan()
    if bool(reward_PG.isinf().any()) or not bool(is_graded_PG.any()):
        raise NonFiniteRewards("rewards must be finite, and some completion must have one: quarantine the step")
    is_zero_std_P = is_equal(reward_PG)
    centred_PG = _centred(reward_PG).where(~is_zero_std_P[:, None], 0.0)
    std_P = _std(reward_PG, cfg.ddof).where(~is_zero_std_P, 0.0)
    match cfg.scale_rewards:
        case "group":
            scaled_PG = centred_PG / (std_P[:, None] + cfg.adv_eps)
        case "batch":
            flat = reward_PG.reshape(1, -1)
            std = torch.zeros_like(std_P[:1]) if bool(is_equal(flat)) else _std(flat, cfg.ddof)
            scaled_PG = centred_PG / (std + cfg.adv_eps)
        case "none":
            scaled_PG = centred_PG
    advantage_PG = scaled_PG.where(~is_zero_std_P[:, None], 0.0)

    keep_PG = is_graded_PG
    if cfg.mask_truncated:
        if is_truncated_PG is None:
            raise ValueError("mask_truncated needs to know which completions were truncated")
        keep_PG = keep_PG & ~is_truncated_PG.bool()
    varied_PG = ~is_zero_std_P[:, None]
    return Advantages(
        advantage_PG=advantage_PG,
        is_zero_std_P=is_zero_std_P,
        std_P=std_P,
        policy_keep_PG=keep_PG if cfg.zero_std_groups == "keep" else keep_PG & varied_PG,
        kl_keep_PG=keep_PG & varied_PG if cfg.zero_std_groups == "drop_all" else keep_PG,
    )


def _centred(reward_PG: Tensor) -> Tensor:
    """Rewards less the mean of their group's grades; 0 for those without a grade."""
    is_graded_PG = ~reward_PG.isnan()
    known_PG = reward_PG.where(is_graded_PG, 0.0)
    mean_P = known_PG.sum(-1) / is_graded_PG.sum(-1).clamp(min=1)
    return (known_PG - mean_P[:, None]).where(is_graded_PG, 0.0)


def _std(reward_PG: Tensor, ddof: int) -> Tensor:
    """(P) Standard deviation of each group's grades."""
    count_P = (~reward_PG.isnan()).sum(-1)
    return (_centred(reward_PG).square().sum(-1) / (count_P - ddof).clamp(min=1)).sqrt()


def is_equal(reward_PG: Tensor) -> Tensor:
    """(P) True for groups whose grades are equal up to rounding, or that have fewer than two (NaN is no grade)."""
    is_graded_PG = ~reward_PG.isnan()
    spread_P = reward_PG.where(is_graded_PG, -torch.inf).amax(-1) - reward_PG.where(is_graded_PG, torch.inf).amin(-1)
    return spread_P <= RELATIVE_TOLERANCE * reward_PG.where(is_graded_PG, 0.0).abs().amax(-1) + ABSOLUTE_TOLERANCE
