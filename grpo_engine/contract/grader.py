"""Graders: declarative, composable, OpenAI's shapes where they exist. No code from a job is ever run.

Templates such as `{{item.reference_answer}}` and `{{sample.output_text}}` are filled from the dataset row and the
completion.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import Strict

Template = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


class StringCheck(Strict):
    """1.0 when the comparison holds, else 0.0."""

    type: Literal["string_check"]
    name: Name = "string_check"
    input: Template = "{{sample.output_text}}"
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"] = "eq"


class Regex(Strict):
    """1.0 when the RE2 pattern is found in the input, else 0.0 (linear time)."""

    type: Literal["regex"]
    name: Name = "regex"
    input: Template = "{{sample.output_text}}"
    pattern: Annotated[str, Field(min_length=1, max_length=1024)]


class Math(Strict):
    """1.0 when the answer in the input equals the reference as mathematics, else 0.0."""

    type: Literal["math"]
    name: Name = "math"
    input: Template = "{{sample.output_text}}"
    reference: Template = "{{item.reference_answer}}"


class Multi(Strict):
    """A weighted sum of graders."""

    type: Literal["multi"]
    name: Name = "multi"
    graders: Annotated[dict[Name, Grader], Field(min_length=1, max_length=16)]
    weights: dict[Name, float]

    @model_validator(mode="after")
    def _weights_match(self) -> Multi:
        if set(self.weights) != set(self.graders):
            raise ValueError("weights must name exactly the graders; add or remove names until both agree")
        return self


Grader = Annotated[StringCheck | Regex | Math | Multi, Field(discriminator="type")]
Multi.model_rebuild()
