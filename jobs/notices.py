"""What a worker has to say for a job's history and no engine can: carried by Redis, written down by the dispatcher.

A notice changes nothing and decides nothing. One is lost when Redis is wiped or the dispatcher dies between taking and writing
it; whatever counts goes by claim file, events and verdict instead.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_engine.contract.event import Level


class Notice(BaseModel):
    """One line of history, in a worker's words."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    type: Literal["attempt.duplicate_delivery", "attempt.device_quarantined"]
    job_id: str = Field(max_length=100)
    epoch: int = Field(ge=1, le=2**53)
    worker: str = Field(max_length=300)
    message: str = Field(min_length=1, max_length=2000)
    level: Level = "info"
    data: dict[str, Any] = Field(default_factory=dict)
