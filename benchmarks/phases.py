"""Where a training step spends its time: seconds per phase for the arithmetic example, or for any spec.

    python benchmarks/phases.py                       # examples/arithmetic.json, 3 steps
    python benchmarks/phases.py --steps 10 --spec my.json --data my.jsonl --precision fp32

Runs `python -m grpo_engine` in a temporary directory and reads its events. Not a test: absolute times drift with the
machine and with what else runs on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("sample", "grade", "reference", "update", "checkpoint", "step")


def main() -> int:
    """Run the engine and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spec", type=Path, default=ROOT / "examples" / "arithmetic.json")
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "arithmetic.jsonl")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--cache-dir", type=Path, default=None, help="where converted models are kept")
    arguments = parser.parse_args()
    spec = json.loads(arguments.spec.read_text())
    grpo = spec["method"]["grpo"]
    grpo["limits"] = {**grpo.get("limits", {}), "num_steps": arguments.steps}
    grpo["resources"] = {**grpo.get("resources", {}), "precision": arguments.precision}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        dispatch: dict[str, Any] = {"spec": spec, "training_file": str(arguments.data.resolve())}
        if arguments.cache_dir is not None:
            dispatch["cache_dir"] = str(arguments.cache_dir.resolve())
        (run_dir / "dispatch.json").write_text(json.dumps(dispatch))
        engine = subprocess.Popen([sys.executable, "-m", "grpo_engine", str(run_dir)], cwd=ROOT)
        try:
            show(follow(run_dir / "events.jsonl", engine))
        finally:
            engine.terminate()
            code = engine.wait()
    return code


def follow(path: Path, engine: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Events as the engine writes them, until it ends."""
    offset, is_running = 0, True
    while is_running:
        is_running = engine.poll() is None
        if path.exists():
            block = path.read_bytes()[offset:]
            whole = block[: block.rfind(b"\n") + 1]
            offset += len(whole)
            yield from (json.loads(line) for line in whole.splitlines())
        time.sleep(0.2)


def show(events: Iterator[dict[str, Any]]) -> None:
    """Print seconds per phase of each step as it comes, and the median."""
    rows: list[dict[str, float]] = []
    for event in events:
        if event["type"] == "engine.started":
            print(" ".join(f"{key}={value}" for key, value in event["data"].items()))
            print(f"{'step':>6}" + "".join(f"{phase:>12}" for phase in PHASES) + f"{'tokens/s':>12}")
        elif event["type"] == "step.completed":
            rows.append(event["data"]["metrics"])
            print(f"{event['step']:>6}" + _line(rows[-1]), flush=True)
        elif event["type"] == "run.finished" and event["level"] == "error":
            print(event["message"])
    if rows:
        names = [f"time/{phase}_s" for phase in PHASES] + ["throughput/tokens_per_s"]
        print(f"{'median':>6}" + _line({name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}))


def _line(metrics: dict[str, float]) -> str:
    cells = [f"{metrics.get(f'time/{phase}_s', 0.0):>12.2f}" for phase in PHASES]
    return "".join(cells) + f"{metrics.get('throughput/tokens_per_s', 0.0):>12.0f}"


if __name__ == "__main__":
    sys.exit(main())
