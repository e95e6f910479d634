"""How per-token terms become one number: what `null` and `match_loss` stand for."""

from __future__ import annotations

from grpo_engine.contract.job import Aggregation, LossConfig, LossType
from grpo_engine.contract.kl import KlConfig

AGGREGATION_OF: dict[LossType, Aggregation] = {
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "gspo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
}
"""What each loss's paper does with its tokens; `loss.aggregation` overrides it."""


def loss_aggregation(cfg: LossConfig) -> Aggregation:
    """The aggregation of the policy term: the configured one, else its paper's."""
    return cfg.aggregation or AGGREGATION_OF[cfg.type]


def kl_aggregation(kl: KlConfig, loss: LossConfig) -> Aggregation:
    """The aggregation of the KL term, `match_loss` resolved."""
    return loss_aggregation(loss) if kl.aggregation == "match_loss" else kl.aggregation
