"""Steps folded together: how many readings of a metric, the first, the last, the smallest and the largest, each with its step.

A series of a million readings is drawn from a thousand buckets; reading all of it for that takes seconds. So the bookkeeper folds
every 8 steps that are complete, and of those every 64 and 512, as they come in. A bucket whose width is a power of two consists of
whole folds; where there is none (the newest steps, a database from before) the steps themselves are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WIDTHS = (8, 64, 512)
"""Steps in a fold; each a multiple of the one before. Fold n of width w holds steps n*w + 1 to n*w + w."""

Fold = dict[str, list[Any]]
"""Metric name to [count, first step, first, last step, last, min step, min, max step, max]. Readings as the engine spelled them;
the extremes ignore readings that are not finite and are null when there is no other."""

_NONFINITE = frozenset(("nan", "inf", "-inf"))


def bucket_width(first: int, last: int, resolution: int) -> int:
    """The smallest power of two that puts steps first to last into at most `resolution` buckets."""
    width = 1
    while (last - 1) // width - (first - 1) // width + 1 > resolution:
        width *= 2
    return width


def fold_of(width: int) -> int:
    """The widest fold that buckets of this width consist of; 1 = the steps themselves."""
    return max((known for known in WIDTHS if known <= width), default=1)


def add_step(into: Fold, step: int, metrics: Mapping[str, Any]) -> None:
    """Fold the readings of a step that follows those in `into`. What is no number is left out."""
    for name, raw in metrics.items():
        if type(raw) is float or type(raw) is int:
            is_finite = True
        elif isinstance(raw, dict) and raw.get("nonfinite") in _NONFINITE:
            is_finite = False
        else:
            continue
        entry = into.get(name)
        if entry is None:
            into[name] = [1, step, raw, step, raw, step, raw, step, raw] if is_finite else [1, step, raw, step, raw, None, None, None, None]
            continue
        entry[0] += 1
        entry[3], entry[4] = step, raw
        if is_finite:
            if entry[6] is None or raw < entry[6]:
                entry[5], entry[6] = step, raw
            if entry[8] is None or raw > entry[8]:
                entry[7], entry[8] = step, raw


def add_fold(into: Fold, later: Fold) -> None:
    """Fold what follows `into`."""
    for name, entry in later.items():
        known = into.get(name)
        if known is None:
            into[name] = list(entry)
            continue
        known[0] += entry[0]
        known[3], known[4] = entry[3], entry[4]
        if entry[6] is not None and (known[6] is None or entry[6] < known[6]):
            known[5], known[6] = entry[5], entry[6]
        if entry[8] is not None and (known[8] is None or entry[8] > known[8]):
            known[7], known[8] = entry[7], entry[8]


def fold_steps(width: int, steps: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[int, Fold]:
    """Folds by number, from steps in order."""
    folds: dict[int, Fold] = {}
    for step, metrics in steps:
        add_step(folds.setdefault((step - 1) // width, {}), step, metrics)
    return folds
