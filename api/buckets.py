"""Thinning a long metric series to a number of buckets that keep its first, last, smallest and largest value; and CSV.

Plain dicts in the shape of `contract.view.MetricSeries`: a page can hold a hundred thousand points, and models of each would take
ten times as long as the points themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from grpo_engine.contract.telemetry import DESCRIPTORS

Spelled = float | dict[str, str | None]
"""A number as JSON has it; `contract.view.Number` without the model."""


def spelled(value: float) -> Spelled:
    """A float as an answer spells it."""
    if math.isfinite(value):
        return value
    return {"value": None, "nonfinite": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def thin(name: str, points: Sequence[tuple[int, float]], resolution: int) -> dict[str, Any]:
    """`points` = (step, value) in step order, at most `resolution` buckets of equal width in steps."""
    descriptor = DESCRIPTORS.get(name)
    buckets: list[dict[str, Any]] = []
    if points:
        start = points[0][0]
        width = max(1, math.ceil((points[-1][0] - start + 1) / resolution))
        buckets = [_bucket(list(group)) for _, group in groupby(points, key=lambda point: (point[0] - start) // width)]
    unit, direction = (descriptor.unit, descriptor.direction) if descriptor else (None, None)
    return {"name": name, "unit": unit, "direction": direction, "buckets": buckets}


def _bucket(points: list[tuple[int, float]]) -> dict[str, Any]:
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    lowest, highest = (min(finite), max(finite, key=lambda pair: pair[0])) if finite else (None, None)
    return {
        "step_from": points[0][0],
        "step_to": points[-1][0],
        "count": len(points),
        "first": _point(*points[0]),
        "last": _point(*points[-1]),
        "min": None if lowest is None else _point(lowest[1], lowest[0]),
        "max": None if highest is None else _point(highest[1], highest[0]),
    }


def _point(step: int, value: float) -> dict[str, Any]:
    return {"step": step, "value": spelled(value)}


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
