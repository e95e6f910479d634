"""What stands below the lines of a job that is watched: how far it is, how long it will take, and three curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from api.client.display import number, sparkline

LATEST = 8
"""Steps the remaining time is reckoned from."""
CURVE = 48
"""Most columns of a curve; fewer on a narrow terminal."""
_ROOM = 34
"""Columns beside it: label and reading."""


class Gauge:
    """Readings by step, drawn anew as they come. Steps that a rewind supersedes are forgotten."""

    def __init__(self, num_steps: int, estimator: str, encoding: str = "utf-8") -> None:
        self._num_steps = num_steps
        self._names = {f"kl/ref {estimator}": f"kl/ref/{estimator}/mean", "beta": "beta/applied", "reward": "reward/mean"}
        self._encoding = encoding
        self._steps: dict[int, dict[str, float | None]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        self._steps[step] = {name: number(metrics.get(name)) for name in (*self._names.values(), "time/step_s")}

    def rewind(self, to_step: int) -> None:
        """Steps after this one are done anew."""
        self._steps = {step: readings for step, readings in self._steps.items() if step <= to_step}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(CURVE, max(8, options.max_width - _ROOM))
        yield self._bar(width)
        ordered = [self._steps[step] for step in sorted(self._steps)]
        for label, name in self._names.items():
            values = [readings[name] for readings in ordered]
            latest = next((value for value in reversed(values) if value is not None), None)
            line = Text(f"{label:<12}", style="dim", no_wrap=True, overflow="crop")
            line.append(f"{sparkline(values, width, self._encoding):<{width}}", style="not dim cyan")
            line.append(f"  {'-' if latest is None else f'{latest:.4g}'}", style="not dim")
            yield line

    def _bar(self, width: int) -> Text:
        step = max(self._steps, default=0)
        share = min(1.0, step / self._num_steps) if self._num_steps else 0.0
        full, empty = ("━", "─") if self._encoding.lower().startswith("utf") else ("#", ".")
        filled = math.floor(share * width)
        line = Text(f"{f'{step}/{self._num_steps}':<12}", style="bold", no_wrap=True, overflow="crop")
        line.append(full * filled, style="not bold green")
        line.append(empty * (width - filled), style="not bold dim")
        line.append(f"  {share:4.0%}  {self._left(step)}", style="not bold")
        return line

    def _left(self, step: int) -> str:
        """Time to the last step, by the latest ones."""
        latest = [self._steps[one].get("time/step_s") for one in sorted(self._steps)[-LATEST:]]
        times = [seconds for seconds in latest if seconds is not None and math.isfinite(seconds)]
        if not times or step >= self._num_steps:
            return ""
        seconds = round(sum(times) / len(times) * (self._num_steps - step))
        return f"{seconds // 3600}:{seconds % 3600 // 60:02}:{seconds % 60:02} left"
