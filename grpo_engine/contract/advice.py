"""What a valid job is warned about when it is posted: legal settings that are known to disappoint.

Advice never refuses. The running job's detectors (contract/diagnostics.py) watch the same thresholds on what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_engine.contract.aggregation import kl_aggregation
from grpo_engine.contract.base import Strict
from grpo_engine.contract.beta import DeadbandBeta, FixedBeta, PpoBeta, ScheduleBeta, ZieglerBeta, needs_reference, schedule_values
from grpo_engine.contract.job import GrpoConfig


class Advice(Strict):
    """One warning."""

    code: str
    """Stable; the name of the detector where there is one."""
    param: str
    message: str


def advise(grpo: GrpoConfig) -> list[Advice]:
    """Warnings about a valid configuration, most serious first within their section."""
    return [*_about_beta(grpo), *_about_kl(grpo)]


def _about_beta(grpo: GrpoConfig) -> Iterator[Advice]:
    at, limits = "method.grpo.beta", grpo.diagnostics
    for value in _values(grpo):
        if value > limits.beta_high.beta:
            yield Advice(
                code="beta_high", param=at, message=f"beta {value:g} is high: learning may be slow; compare it with the size of the rewards"
            )
        if 0 < value < limits.beta_low.beta:
            yield Advice(
                code="beta_low", param=at, message=f"beta {value:g} is low: watch kl/ref, or set 0 and save the reference's memory"
            )
    beta = grpo.beta
    if not isinstance(beta, DeadbandBeta | PpoBeta | ZieglerBeta):
        return
    if beta.target is not None and beta.unit == "token":
        if beta.target > limits.target_too_large.target:
            message = f"target {beta.target:g} nats per token allows the policy to leave the reference"
            yield Advice(code="target_too_large", param=f"{at}.target", message=message)
        if beta.target < limits.target_too_small.target:
            message = f"target {beta.target:g} nats per token is hard to hold: beta may climb to its max"
            yield Advice(code="target_too_small", param=f"{at}.target", message=message)
    warm_up = 0 if beta.calibration is None else beta.calibration.rollouts
    if warm_up + beta.update_every > grpo.limits.num_steps:
        message = (
            f"the rule first decides after {warm_up + beta.update_every} rollouts, the run has {grpo.limits.num_steps}: beta will not move"
        )
        yield Advice(code="rule_never_acts", param=f"{at}.update_every", message=message)
    if not beta.arming:
        message = "without arming the rule lowers beta while KL is still near 0 at the start; set arming to true unless you follow a recipe"
        yield Advice(code="no_arming", param=f"{at}.arming", message=message)


def _values(grpo: GrpoConfig) -> list[float]:
    match grpo.beta:
        case FixedBeta(value=value):
            return [value]
        case ScheduleBeta(schedule=schedule):
            values = schedule_values(schedule)
            return sorted({min(values), max(values)})
        case beta:
            return [beta.value] if beta.value is not None else []


def _about_kl(grpo: GrpoConfig) -> Iterator[Advice]:
    kl, at = grpo.kl, "method.grpo.kl"
    if not needs_reference(grpo.beta):
        return
    if kl.placement == "loss" and kl.grad == "naive":
        which = {
            "k1": "has no effect on average",
            "k3": "descends KL(pi_ref || pi_theta), the other direction",
        }.get(kl.estimator, "is not that of the divergence")
        yield Advice(
            code="biased_gradient",
            param=f"{at}.grad",
            message=f"the naive gradient of {kl.estimator} {which}; unbiased is the divergence's own",
        )
    if kl.clip_grad == "zero":
        message = "clipped tokens get no gradient, and they are the ones farthest from the reference; straight_through keeps it"
        yield Advice(code="zero_clip_gradient", param=f"{at}.clip_grad", message=message)
    if kl.placement == "loss" and kl_aggregation(kl, grpo.loss) == "seq_sum":
        message = "summed KL makes long completions expensive: lengths may fall; seq_mean_token_mean does not"
        yield Advice(code="length_bias", param=f"{at}.aggregation", message=message)
    if grpo.loss.num_iterations > 1 and kl.placement == "loss" and kl.importance == "none" and kl.estimator != "exact":
        message = f"{grpo.loss.num_iterations} updates per rollout are off-policy: without a weight the KL is that of old samples; use old"
        yield Advice(code="no_importance", param=f"{at}.importance", message=message)
