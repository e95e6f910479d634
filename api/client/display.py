"""How telemetry reads on a terminal: one line a step, one line an event, one mark a reading."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

QUIET_EVENTS = frozenset({"step.completed", "engine.started", "data.loaded"})
"""Events that say nothing new to somebody who watches the steps."""
_LEVEL_STYLES = {"warn": "yellow", "error": "bold red"}
_ACTIONS = {1: ("raised", "bold yellow"), -1: ("lowered", "bold cyan"), 0: ("", "")}


def number(raw: Any) -> float | None:
    """A metric as a float; None when it is absent."""
    if isinstance(raw, dict):
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(str(raw.get("nonfinite")))
    return float(raw) if isinstance(raw, int | float) else None


WIDE = 96
"""Columns a step's whole line takes; a narrower terminal gets it without the completion length."""
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-~=+*#"
"""For terminals that know only ASCII."""


def sparkline(values: Sequence[float | None], width: int, encoding: str = "utf-8") -> str:
    """The course of a metric in at most `width` marks, the latest last; each mark is the mean of the steps it stands for. What was
    not measured, or is not finite, is a blank."""
    bars = _BARS if encoding.lower().startswith("utf") else _PLAIN_BARS
    count = min(width, len(values))
    marks: list[float | None] = []
    for place in range(count):
        part = values[place * len(values) // count : (place + 1) * len(values) // count]
        known = [value for value in part if value is not None and math.isfinite(value)]
        marks.append(math.fsum(value / len(known) for value in known) if known else None)
    heights = [mark for mark in marks if mark is not None]
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    scale = high - low if math.isfinite(high - low) else 0.0
    top = len(bars) - 1
    return "".join(
        " " if mark is None else bars[0] if scale <= 0 else bars[min(top, max(0, round((mark - low) / scale * top)))] for mark in marks
    )


def step_line(step: int, num_steps: int, metrics: Mapping[str, Any], estimator: str, width: int = WIDE) -> Text:
    """`step  7/25  kl 0.1312  beta 0.0600 raised  reward 0.341  length 21.4  9.8 s`."""
    values = {name: number(raw) for name, raw in metrics.items()}
    digits_of_step = len(str(num_steps))
    line = Text(f"step {step:>{digits_of_step}}/{num_steps}", style="bold")
    line.append(f"  kl/ref {estimator} ", style="dim")
    line.append(_shown(values.get(f"kl/ref/{estimator}/mean"), 4, 7), style="not bold")
    line.append("  beta ", style="dim")
    line.append(_shown(values.get("beta/applied"), 4, 7), style="not bold")
    action, style = _ACTIONS[int(values.get("beta/action") or 0)]
    line.append(f" {action:<7}", style=style or "dim")
    shown = [("reward", "reward/mean", 3, 6), ("length", "completion/length_mean", 1, 5)]
    for label, name, digits, size in shown if width >= WIDE else shown[:1]:
        line.append(f" {label} ", style="dim")
        line.append(_shown(values.get(name), digits, size), style="not bold")
    line.append(f"  {_shown(values.get('time/step_s'), 1, 5)} s", style="dim")
    return line


def event_line(event: str, level: str, message: str, created_at: float) -> Text:
    """An event in one line."""
    clock = time.strftime("%H:%M:%S", time.localtime(created_at))
    line = Text(f"{clock}  ", style="dim")
    line.append(f"{event}  ", style=_LEVEL_STYLES.get(level, "green"))
    line.append(message)
    return line


def _shown(value: float | None, digits: int, width: int) -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def size(count: int) -> str:
    """Bytes for people: `541 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
