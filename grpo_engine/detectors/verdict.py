"""What a detector says about one step."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.contract.aggregation import kl_aggregation
from grpo_engine.contract.beta import KlUnit
from grpo_engine.contract.job import GrpoConfig


@dataclass(frozen=True)
class Verdict:
    """The condition at the newest step. `is_on` counts towards firing, `is_off` towards clearing; between them nothing counts."""

    is_on: bool
    is_off: bool
    reading: float
    threshold: float
    message: str

    @classmethod
    def of(cls, is_on: bool, reading: float, threshold: float, message: str) -> Verdict:
        """A verdict without a gap between on and off."""
        return cls(is_on, not is_on, reading, threshold, message)


@dataclass(frozen=True)
class JobTraits:
    """What detectors need to know of the job besides its metrics."""

    unit: KlUnit
    update_every: int
    sums_kl_over_tokens: bool
    """Whether a longer completion pays more KL."""
    starts_at_reference: bool
    """Whether KL at step 1 must be 0."""

    @classmethod
    def of(cls, grpo: GrpoConfig) -> JobTraits:
        """From the job's configuration."""
        aggregation = kl_aggregation(grpo.kl, grpo.loss)
        in_reward = grpo.kl.placement != "loss" and grpo.kl.discount > 0
        return cls(
            unit=getattr(grpo.beta, "unit", "token"),
            update_every=getattr(grpo.beta, "update_every", 1),
            sums_kl_over_tokens=in_reward or aggregation in ("seq_sum", "constant"),
            starts_at_reference=grpo.reference.source == "initial",
        )
