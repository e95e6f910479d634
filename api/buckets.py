"""Thinning a long metric series to a number of buckets that keep its first, last, smallest and largest value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from grpo_engine.contract.telemetry import DESCRIPTORS
from grpo_engine.contract.view import Bucket, MetricSeries, NonFinite, Number, Point


def number(value: float | None) -> Number:
    """A float as an answer spells it; None stands for NaN."""
    if value is None or math.isnan(value):
        return NonFinite(nonfinite="nan")
    if math.isinf(value):
        return NonFinite(nonfinite="inf" if value > 0 else "-inf")
    return value


def thin(name: str, points: Sequence[tuple[int, float]], resolution: int) -> MetricSeries:
    """`points` = (step, value) in step order, at most `resolution` buckets of equal width in steps."""
    descriptor = DESCRIPTORS.get(name)
    buckets: list[Bucket] = []
    if points:
        start = points[0][0]
        width = max(1, math.ceil((points[-1][0] - start + 1) / resolution))
        buckets = [_bucket(list(group)) for _, group in groupby(points, key=lambda point: (point[0] - start) // width)]
    unit, direction = (descriptor.unit, descriptor.direction) if descriptor else (None, None)
    return MetricSeries(name=name, unit=unit, direction=direction, buckets=buckets)


def _bucket(points: list[tuple[int, float]]) -> Bucket:
    finite = [point for point in points if math.isfinite(point[1])]
    return Bucket(
        step_from=points[0][0],
        step_to=points[-1][0],
        count=len(points),
        first=_point(points[0]),
        last=_point(points[-1]),
        min=_point(min(finite, key=lambda point: point[1])) if finite else None,
        max=_point(max(finite, key=lambda point: point[1])) if finite else None,
    )


def _point(point: tuple[int, float]) -> Point:
    return Point(step=point[0], value=number(point[1]))


def rows_to_csv(names: Sequence[str], rows: Iterable[tuple[int, int, int, dict[str, float]]]) -> Iterable[str]:
    """CSV lines of (step, epoch, logged_at, metrics): a column a metric, empty where a step lacks it, nan and inf spelled."""
    yield ",".join(["step", "epoch", "logged_at", *(_quoted(name) for name in names)]) + "\r\n"
    for step, epoch, logged_at, metrics in rows:
        cells = [_cell(metrics[name]) if name in metrics else "" for name in names]
        yield ",".join([str(step), str(epoch), str(logged_at), *cells]) + "\r\n"


def _cell(value: float) -> str:
    return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text
