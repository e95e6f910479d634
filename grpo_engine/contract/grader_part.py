"""What the graders of the contract share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.contract.base import Strict

Template = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


class GraderPart(Strict):
    """What every grader that reads the row or the completion shares."""

    if_missing: Literal["error", "skip"] = "error"
    """A row without a field that a template names: an error, or (inside `multi` only) this grader does not apply to the row."""
