"""A toy closed loop: the KL that a coefficient leads to, KL = c * beta^-g, with an optional lag, and the rule that steers it."""

from __future__ import annotations

from typing import Any

from grpo_engine.beta import BetaRule
from grpo_engine.contract.beta import DeadbandBeta

TRACE_KL = [0.010, 0.018, 0.030, 0.050, 0.040, 0.022, 0.017, 0.012, 0.005, 0.020]
"""The KL series every trace in test_beta_traces.py is driven with; beta starts at 0.02, the target is 0.02."""


def trace(rule: BetaRule, kl: list[float], episodes: int = 0) -> list[float]:
    """Beta of the next step after each rollout."""
    return [rule.update(step, value, value, episodes).new for step, value in enumerate(kl, start=1)]


def unchecked_deadband(**settings: Any) -> DeadbandBeta:
    """The recipe without validation, to show what validation refuses (an EMA longer than the time between decisions)."""
    plain: dict[str, Any] = {
        **DeadbandBeta(rule="deadband", value=0.02, target=0.02, arming=False).model_dump(),
        "update_every": 1,
        "min": 1e-9,
        "max": 1e9,
        **settings,
    }
    return DeadbandBeta.model_construct(**plain)


def closed_loop(
    cfg: DeadbandBeta, steps: int, *, gain: float = 1.0, start: float = 0.05, lag: float = 0.0
) -> tuple[list[float], list[float]]:
    """(beta, KL) series.

    At beta 0.02 the plant settles at KL `start`; with a lag it covers 1/lag of the way in a step.
    """
    rule = BetaRule.create(cfg, steps)
    scale = start * 0.02**gain
    kl = start
    betas, readings = [], []
    for step in range(1, steps + 1):
        steady = scale * rule.value(step) ** -gain
        kl = steady if lag == 0 else kl + (steady - kl) / lag
        rule.update(step, kl, kl, 0)
        betas.append(rule.value(step + 1))
        readings.append(kl)
    return betas, readings
