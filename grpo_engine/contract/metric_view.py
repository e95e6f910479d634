"""Telemetry as the server shows it: rows by step, thinned series, and whether all of it is there."""

from __future__ import annotations

from typing import Literal

from grpo_engine.contract.telemetry import Direction
from grpo_engine.contract.view_base import Number, View


class MetricRow(View):
    """Telemetry of one step."""

    step: int
    epoch: int
    seq: int
    """Of the engine event; `<epoch>-<seq>` is its id in `metrics/stream`, so a stream can go on after this row."""
    logged_at: int
    metrics: dict[str, Number]


class Point(View):
    """A value at a step."""

    step: int
    value: Number


class Bucket(View):
    """Several steps of one metric; extremes ignore values that are not finite."""

    step_from: int
    step_to: int
    count: int
    first: Point
    last: Point
    min: Point | None
    max: Point | None


class MetricSeries(View):
    """One metric, thinned."""

    name: str
    unit: str | None
    direction: Direction | None
    buckets: list[Bucket]


class Integrity(View):
    """Whether the telemetry is whole."""

    object: Literal["fine_tuning.job.metrics.integrity"] = "fine_tuning.job.metrics.integrity"
    last_step: int
    num_steps: int
    """Steps that count."""
    missing_steps: list[int]
    """At most the first 1000."""
    num_superseded: int
    """Steps measured again by a later attempt or after a rollback; only the later reading counts."""
    num_gaps: int
    """Times a part of an events file could not be read."""
    ingest_lag: int | None
    """Events in the stream that are not in the database yet; null when Redis does not answer."""
    is_complete: bool


class MetricPage(View):
    """Rows in step order; superseded steps are gone."""

    object: Literal["list"] = "list"
    data: list[MetricRow]
    has_more: bool
    """More steps follow; go on with global_step_from = last step + 1."""
    sampled: Literal[False] = False


class SampledMetrics(View):
    """Series thinned to at most `resolution` buckets."""

    object: Literal["list"] = "list"
    data: list[MetricSeries]
    has_more: Literal[False] = False
    sampled: Literal[True] = True
    resolution: int
