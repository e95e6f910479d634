"""Watched metrics of runs, kept as JSON one line a step, and read again for a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_engine.detectors.history import WATCHED
from tests.engine.runs import series

Recording = dict[str, Any]
"""`names` of the metrics, and `rows` of their values, a row a step."""


def keep(run_dir: Path) -> Recording:
    """The watched metrics of a finished attempt, five digits each."""
    metrics = series(run_dir)
    names = sorted({key for row in metrics.values() for key in row} & WATCHED)
    rows = [[None if (value := metrics[step].get(key)) is None else float(f"{value:.5g}") for key in names] for step in sorted(metrics)]
    return {"names": names, "rows": rows}


def write(target: Path, recorded: dict[str, Recording]) -> None:
    """One line a step, so that a change of one run reads as one."""
    lines = [f'"{name}": {{"names": {json.dumps(run["names"])}, "rows": [\n' for name, run in recorded.items()]
    parts = [line + ",\n".join(json.dumps(row) for row in run["rows"]) + "\n]}" for line, run in zip(lines, recorded.values(), strict=True)]
    target.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def steps_of(recording: Recording) -> list[tuple[int, dict[str, float]]]:
    """Step and metrics, as a replay takes them."""
    return [
        (step, {key: value for key, value in zip(recording["names"], row, strict=True) if value is not None})
        for step, row in enumerate(recording["rows"], start=1)
    ]
