"""What is measured: the KL divergence between the policy and the reference, and how it enters training.

Terms follow the literature. `policy_ref` is KL(pi_theta || pi_ref), the "reverse" KL of DeepSeekMath eq. 3-4;
`ref_policy` is KL(pi_ref || pi_theta), the "forward" KL. All values are in nats.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_engine.contract.base import PositiveFloat, Strict, broken_rule

Direction = Literal["policy_ref", "ref_policy", "jeffreys"]
Estimator = Literal["k1", "k2", "k3", "abs", "exact"]
Gradient = Literal["unbiased", "naive"]
Importance = Literal["none", "old", "sampler"]
Placement = Literal["loss", "reward", "advantage"]
KlAggregation = Literal["match_loss", "token_mean", "seq_mean_token_mean", "seq_sum", "constant"]

DIVERGENCES: dict[Direction, str] = {
    "policy_ref": "KL(pi_theta || pi_ref)",
    "ref_policy": "KL(pi_ref || pi_theta)",
    "jeffreys": "KL(pi_theta || pi_ref) + KL(pi_ref || pi_theta)",
}
"""What the job view echoes, so that nobody has to guess what "forward" means."""
_LOSS_ONLY: dict[str, str | None] = {
    "grad": "unbiased",
    "importance": "none",
    "aggregation": "match_loss",
    "clip_grad": "straight_through",
}
"""Settings (at the value that does nothing) which placement reward and advantage do not read."""
_SAMPLED_ONLY: dict[str, str | None] = {"grad": "unbiased", "importance": "none", "log_ratio_clip": None}
"""Settings (at the value that does nothing) which estimator exact does not read."""
_DIRECTION_ALIASES = {"reverse": "policy_ref", "forward": "ref_policy"}


def _canonical_direction(value: Any) -> Any:
    return _DIRECTION_ALIASES.get(value, value) if isinstance(value, str) else value


class KlConfig(Strict):
    """How KL is estimated, differentiated and placed."""

    direction: Annotated[Direction, BeforeValidator(_canonical_direction)] = "policy_ref"
    """Which divergence. Aliases: `reverse` = policy_ref, `forward` = ref_policy. `jeffreys` is the sum of both."""

    estimator: Estimator = "k3"
    """Per-token estimator of the value; `exact` sums over the whole vocabulary."""

    grad: Gradient = "unbiased"
    """`unbiased` differentiates the true divergence; `naive` is plain autograd through the estimator (DeepSeekMath)."""

    importance: Importance = "old"
    """Off-policy weight on the KL term, per token: `old` = pi_theta/pi_old, `sampler` = pi_theta/pi_sampler. `none` when left
    out for estimator exact (the sum over the vocabulary needs no weight) and for placement reward or advantage."""

    importance_clip: PositiveFloat | None = None
    """Upper bound on the importance weight; null leaves it unclipped."""

    placement: Placement = "loss"
    """Where the penalty acts: in the `loss`; as a per-token `reward` (k1 still to come, after group normalisation); or in the
    `advantage`, the same less its mean over the batch."""

    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of future KL for placement `reward` and `advantage`: 1 is the full reward-to-go, 0 is tokenwise."""

    aggregation: KlAggregation = "match_loss"
    """How per-token KL becomes one number in the loss, independent of the policy loss."""

    log_ratio_clip: PositiveFloat | None = 20.0
    """Bound on |log pi_ref - log pi_theta| before the exponential; null = none, which is also what estimator exact takes
    when the key is left out."""

    value_clip: PositiveFloat | None = None
    """Upper bound on the per-token value; null = none."""

    clip_grad: Literal["straight_through", "zero"] = "straight_through"
    """Gradient of a clipped token: passed through (taken at the clipped log-ratio; a clipped value keeps its own), or zero."""

    monitor: bool = False
    """Measure kl/ref even when beta is 0 (loads the reference)."""

    allow_biased: bool = False
    """Let combinations through whose gradient is known to be wrong (needed to reproduce literal recipes)."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_without_effect(cls, raw: Any) -> Any:
        """Where a default could have no effect, the resolved configuration says so instead of echoing it."""
        if not isinstance(raw, dict):
            return raw
        filled: dict[str, Any] = {}
        if raw.get("estimator") == "exact":
            filled = {"importance": "none", "log_ratio_clip": None}
        elif raw.get("placement") in ("reward", "advantage"):
            filled = {"importance": "none"}
        return {**filled, **raw}

    @model_validator(mode="after")
    def _refuse_wrong_gradients(self) -> KlConfig:
        if self.placement == "loss":
            if (self.estimator, self.grad, self.direction) == ("k1", "naive", "policy_ref") and not self.allow_biased:
                raise broken_rule(
                    "grad",
                    "estimator k1 with grad naive in the loss has zero expected gradient (no regularisation at all); "
                    "set kl.grad to unbiased, or kl.allow_biased to true to reproduce it literally",
                )
            return self
        if self.estimator == "exact":
            raise broken_rule(
                "estimator", f"estimator exact cannot be placed in the {self.placement}; set kl.placement to loss or kl.estimator to k1"
            )
        if self.estimator != "k1":
            raise broken_rule("estimator", f"{self.estimator} in the {self.placement} has a wrong gradient; set kl.estimator to k1")
        if self.direction != "policy_ref":
            raise broken_rule("direction", f"only direction policy_ref can be placed in the {self.placement}; set kl.placement to loss")
        return self

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> KlConfig:
        if self.placement == "loss" and self.discount != 1:
            raise broken_rule("discount", "discount acts on placement reward and advantage only; remove it, or change kl.placement")
        if self.placement != "loss":
            self._expect_idle(_LOSS_ONLY, "{name} acts on placement loss only; leave it at {idle}, or set kl.placement to loss")
        if self.estimator == "exact":
            self._expect_idle(_SAMPLED_ONLY, "{name} has no effect on estimator exact, which sums over the vocabulary; leave it at {idle}")
        if self.importance == "none" and self.importance_clip is not None:
            raise broken_rule("importance_clip", "it bounds a weight that kl.importance none does not use; remove one of them")
        if self.clip_grad == "zero" and self.log_ratio_clip is None and self.value_clip is None:
            raise broken_rule("clip_grad", "clip_grad zero needs a clip; set kl.log_ratio_clip or kl.value_clip, or remove it")
        return self

    def _expect_idle(self, idle: dict[str, str | None], sentence: str) -> None:
        for name, value in idle.items():
            if getattr(self, name) != value:
                raise broken_rule(name, sentence.format(name=name, idle="null" if value is None else value))
