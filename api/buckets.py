"""Metric series as answers show them: buckets that keep the first, last, smallest and largest value; and CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from grpo_engine.contract.telemetry import DESCRIPTORS
from jobs.rollups import Fold

Spelled = float | dict[str, str | None]
"""A number as JSON has it; `contract.view.Number` without the model."""


def spelled(value: float) -> Spelled:
    """A float as an answer spells it."""
    if math.isfinite(value):
        return value
    return {"value": None, "nonfinite": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def series_json(buckets: Sequence[Fold], names: Sequence[str] | None) -> str:
    """JSON of thinned series by name, those of `names` without a reading included: a list of `contract.view.MetricSeries`.

    Spelled by hand, because an answer can hold ten thousands of buckets and objects of each would take longer than all the rest.
    """
    series: dict[str, list[str]] = {name: [] for name in names or ()}
    for bucket in buckets:
        for name, entry in bucket.items():
            series.setdefault(name, []).append(_bucket_json(entry))
    shown = []
    for name, found in sorted(series.items()):
        descriptor = DESCRIPTORS.get(name)
        unit, direction = (descriptor.unit, descriptor.direction) if descriptor else (None, None)
        head = json.dumps({"name": name, "unit": unit, "direction": direction})
        shown.append(f'{head[:-1]}, "buckets": [{",".join(found)}]}}')
    return f"[{','.join(shown)}]"


def _bucket_json(entry: list[Any]) -> str:
    count, first_step, first, last_step, last, min_step, lowest, max_step, highest = entry
    low = "null" if lowest is None else f'{{"step":{min_step},"value":{lowest!r}}}'
    high = "null" if highest is None else f'{{"step":{max_step},"value":{highest!r}}}'
    return (
        f'{{"step_from":{first_step},"step_to":{last_step},"count":{count},"first":{{"step":{first_step},"value":{_number(first)}}},'
        f'"last":{{"step":{last_step},"value":{_number(last)}}},"min":{low},"max":{high}}}'
    )


def _number(raw: Any) -> str:
    """A finite number as JSON spells it, or a spelled-out one that is not."""
    return repr(raw) if isinstance(raw, int | float) else json.dumps(raw)


def buckets_to_csv(buckets: Sequence[Fold], names: Sequence[str] | None) -> Iterable[str]:
    """CSV lines of thinned series: a line a metric and bucket, those of one metric together and in step order; the extremes, which
    ignore readings that are not finite, are empty where there is no other."""
    yield "name,unit,step_from,step_to,count,first,last,min_step,min,max_step,max\r\n"
    found = {name for bucket in buckets for name in bucket}
    for name in sorted(found if names is None else found.intersection(names)):
        descriptor = DESCRIPTORS.get(name)
        head = f"{_quoted(name)},{_quoted(descriptor.unit) if descriptor else ''}"
        for entry in (bucket[name] for bucket in buckets if name in bucket):
            count, first_step, first, last_step, last, min_step, lowest, max_step, highest = entry
            extremes = "," if lowest is None else f"{min_step},{lowest!r}"
            extremes += ",," if highest is None else f",{max_step},{highest!r}"
            yield f"{head},{first_step},{last_step},{count},{_cell_of(first)},{_cell_of(last)},{extremes}\r\n"


def _cell_of(raw: Any) -> str:
    return repr(raw) if isinstance(raw, int | float) else str(raw["nonfinite"])


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
