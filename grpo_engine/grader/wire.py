"""Requests and answers between the pool and its processes: one JSON object a line."""

from __future__ import annotations

import json
import math
from typing import Any

from grpo_engine.grader.sample import Sample, Score


def encode(message: dict[str, Any]) -> bytes:
    """One line. Values JSON lacks (a plug-in row may hold dates) travel as text."""
    return json.dumps(message, separators=(",", ":"), default=str).encode("ascii") + b"\n"


def request_line(grader: str, sample: Sample) -> bytes:
    """The request to grade one sample."""
    return encode({"grader": grader, "item": dict(sample.item), "output_text": sample.output_text, "extras": dict(sample.extras)})


def compile_line(grader: str, config: str) -> bytes:
    """The request to compile a grader under a name."""
    return encode({"grader": grader, "config": config})


def score_to_wire(score: Score) -> dict[str, Any]:
    """A score as JSON; NaN travels as null."""
    value = None if math.isnan(score.value) else score.value
    return {"value": value, "parts": score.parts, "error": score.error, "kind": score.kind, "detail": score.detail}


def score_from_wire(line: bytes) -> Score:
    """The score in an answer line."""
    message = json.loads(line)
    value = math.nan if message["value"] is None else float(message["value"])
    return Score(value, message["parts"], message["error"], message["kind"], message["detail"])
