"""Checkpoints as the server shows them, and what promotes one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import NonNegativeFloat, PositiveInt, Strict, broken_rule
from grpo_engine.contract.view_base import Number, View


class Gates(Strict):
    """What a checkpoint must show before it is promoted. A reading it does not have fails its gate."""

    max_ref_kl: NonNegativeFloat | None = None
    """KL to the reference, nats per token, at most this."""
    min_reward: float | None = None
    """Mean reward, at least this."""
    max_beta: NonNegativeFloat | None = None
    min_step: PositiveInt | None = None


class Promote(Strict):
    """The body of a promotion."""

    gates: Gates
    """At least one."""
    note: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _has_gates(self) -> Promote:
        if not self.gates.model_dump(exclude_none=True):
            raise broken_rule("gates", "it names none; give max_ref_kl, min_reward, max_beta or min_step")
        return self


class CheckpointFile(View):
    """A file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


class Promotion(View):
    """A checkpoint passed its gates."""

    promoted_at: int
    actor: str
    gates: dict[str, float]
    note: str | None = None


class Checkpoint(View):
    """Published weights."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Number | int | None]
    name: str
    bytes: int
    files: list[CheckpointFile]
    pinned: bool = False
    """Kept whatever `checkpoints.keep` says."""
    promotion: Promotion | None = None
