"""Detectors and guardrails: what a run is watched for, and what happens then."""

from __future__ import annotations

from grpo_engine.contract.base import PositiveFloat, PositiveInt, Strict


class DiagnosticsConfig(Strict):
    """Thresholds of the detectors."""

    kl_high: PositiveFloat = 0.1
    """`kl_out_of_control`: nats per token ..."""
    kl_high_updates: PositiveInt = 3
    """... for this many consecutive steps."""


class Guardrail(Strict):
    """A detector and the action it triggers."""

    detector: str
    action: str
