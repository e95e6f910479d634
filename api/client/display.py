"""How telemetry reads on a terminal: one line a step, one line an event."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
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


def step_line(step: int, num_steps: int, metrics: Mapping[str, Any], estimator: str) -> Text:
    """`step  7/25  kl 0.1312  beta 0.0600 raised  reward 0.341  length 21.4  9.8 s`."""
    values = {name: number(raw) for name, raw in metrics.items()}
    width = len(str(num_steps))
    line = Text(f"step {step:>{width}}/{num_steps}", style="bold")
    line.append(f"  kl/ref {estimator} ", style="dim")
    line.append(_shown(values.get(f"kl/ref/{estimator}/mean"), 4, 7), style="not bold")
    line.append("  beta ", style="dim")
    line.append(_shown(values.get("beta/applied"), 4, 7), style="not bold")
    action, style = _ACTIONS[int(values.get("beta/action") or 0)]
    line.append(f" {action:<7}", style=style or "dim")
    for label, name, digits, size in (("reward", "reward/mean", 3, 6), ("length", "completion/length_mean", 1, 5)):
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
