"""What a grader sees of one completion, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn

FaultKind = Literal["invalid_variable", "raised", "timeout", "crashed", "not_a_number", "formula"]

MAX_OUTPUT_CHARACTERS = 1_000_000
"""Longer completions are a fault, not cut short."""
MAX_SCORE = 1e6
"""Scores of greater magnitude are a fault: one of them would wreck a whole group's advantages."""


class Sample(NamedTuple):
    """One completion to be graded. A plain (item, output_text, extras) tuple serves as well."""

    item: Mapping[str, Any]
    """The dataset row."""
    output_text: str
    """The completion as text, without end token."""
    extras: Mapping[str, Any] = {}
    """`num_tokens`: tokens of the completion. Without it a length in tokens is estimated, and its detail says so."""


@dataclass(frozen=True)
class Score:
    """The answer for one sample: a finite value, or NaN with an error. Never a silent zero."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """Score of each part of a `multi` that applied to the row, by name (nested parts as `outer.inner`)."""
    error: str | None = None
    kind: FaultKind | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    """What was compared or counted, for people."""


class GraderFault(Exception):
    """A grader cannot give a number for a sample. Counted and shown, never turned into a score."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: FaultKind = kind


class MissingField(GraderFault):
    """A template names a field that the row does not have."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_variable", message)


class OutputNotJson(Exception):
    """A template reaches into `sample.output_json` and the completion has no such thing: the completion's failing, so it scores 0."""


class View:
    """One sample with what graders derive from it."""

    def __init__(self, sample: Sample) -> None:
        self.item = sample.item
        self.output_text = sample.output_text
        self.extras = sample.extras

    @cached_property
    def output_json(self) -> Any:
        """The completion as strict JSON. Raises OutputNotJson."""
        try:
            return strict_json(self.output_text)
        except ValueError as error:
            raise OutputNotJson(f"the completion is not JSON: {error}") from None


def strict_json(text: str) -> Any:
    """JSON without NaN or infinities. Raises ValueError for anything else, nesting too deep included."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
