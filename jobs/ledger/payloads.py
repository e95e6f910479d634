"""The data of the engine events the ledger acts on. Keys it does not know are kept with the event and left alone."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import Field

from grpo_engine.contract.base import NonNegativeInt, PositiveInt, Strict
from grpo_engine.contract.event import EngineEvent, encode_nonfinite
from grpo_engine.contract.member import MEMBER_PATTERN

MaybeNumber = float | dict[str, Any] | None
"""Absent, a number, or a spelt-out non-finite number."""

Content = TypeVar("Content", bound=Strict)


class Member(Strict):
    """One file of a checkpoint."""

    name: str = Field(pattern=MEMBER_PATTERN)
    bytes: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class CheckpointSaved(Strict, extra="ignore"):
    """`checkpoint.saved`."""

    name: str = Field(pattern=r"^(step|resume)-[0-9]{6,12}$")
    step: NonNegativeInt
    kind: str = Field(pattern=r"^(published|resume)$")
    files: list[Member] = Field(min_length=1)
    bytes: NonNegativeInt
    ref_kl: MaybeNumber = None
    reward: MaybeNumber = None
    beta: MaybeNumber = None


class ControlAnswered(Strict, extra="ignore"):
    """`control.applied` and `control.refused`."""

    command: PositiveInt
    effective_step: NonNegativeInt | None = None


class RunRewound(Strict, extra="ignore"):
    """`run.rewound`."""

    to_step: NonNegativeInt


class StepCompleted(Strict, extra="ignore"):
    """`step.completed`."""

    metrics: dict[str, Any]
    beta: dict[str, Any] = Field(default_factory=dict)


def parse(model: type[Content], event: EngineEvent) -> Content:
    """The event's data. Raises pydantic's ValidationError."""
    return model.model_validate_json(json.dumps(encode_nonfinite(event.data)))


def finite(value: MaybeNumber) -> float | None:
    """The number; None when there is none or it is not finite."""
    return None if isinstance(value, dict) else value
