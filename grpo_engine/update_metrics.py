"""What the updates of a step report, from the whole step's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_engine.contract.kl import Direction
from grpo_engine.step_metrics import Metrics, kl_metrics, kl_pair_metrics, masked_mean

if TYPE_CHECKING:
    from grpo_engine.update import Update


def first_metrics(update: Update, direction: Direction) -> Metrics:
    """Loss, entropy and KL as they stood before the first update. loss/total = loss/policy + beta/applied * kl/loss_term."""
    tensors = update.tensors
    metrics = {
        "loss/policy": update.policy_sum,
        "loss/total": update.policy_sum,
        "policy/entropy": masked_mean(tensors.entropy_BT, tensors.mask_BT),
        **kl_metrics(tensors, direction),
    }
    if tensors.ref_logprob_BT is not None:
        metrics["kl/loss_term"] = update.kl_sum
        metrics["loss/kl"] = update.beta * update.kl_sum if update.beta > 0 else 0.0
        metrics["loss/total"] = update.policy_sum + metrics["loss/kl"]
        metrics["kl/clip_frac"] = masked_mean(tensors.kl_clipped_BT, update.kl_mask_BT)
    return metrics


def ratio_metrics(update: Update) -> Metrics:
    """How far the policy of this update has moved from the one that opened the step; the last update's numbers stay."""
    tensors, mask_BT = update.tensors, update.policy_mask_BT
    return {
        "policy/ratio_mean": masked_mean(tensors.ratio_BT, mask_BT),
        "policy/clip_frac_low": masked_mean(tensors.clipped_low_BT, mask_BT),
        "policy/clip_frac_high": masked_mean(tensors.clipped_high_BT, mask_BT),
        **kl_pair_metrics("old", tensors.logprob_BT, tensors.old_logprob_BT, tensors.mask_BT, "policy_ref"),
    }
