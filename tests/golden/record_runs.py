"""Train a tiny random model on sums in four ways and record the watched metrics; `test_recorded_runs.py` replays them.

    python -m tests.golden.record_runs        about two minutes on one core; writes tests/golden/recorded_runs.json

`shorter`: almost no penalty, and a reward that pays for short answers. `hacked`: the same with a reward that pays for runs of
the digits 0 to 2. `healthy`: one exact pattern, learning rate 1e-6. `adaptive`: `hacked` under a rule that overshoots, then
brings KL back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.engine.runs import make_job, make_spec, train
from tests.golden.recordings import keep, write

TARGET = Path(__file__).with_name("recorded_runs.json")
RUNS_OF_DIGITS = {
    "type": "multi",
    "graders": {f"at_least_{length}": {"type": "regex", "pattern": f"[0-2]{{{length}}}"} for length in (1, 2, 4, 8, 16)},
    "weights": {f"at_least_{length}": 0.2 for length in (1, 2, 4, 8, 16)},
}
OVERSHOOTING = {"rule": "deadband", "value": 0.02, "target": 0.05, "update_every": 2, "ema_decay": 0.5, "up": 2.0, "down": 1.2, "max": 5.0}
RUNS: dict[str, dict[str, Any]] = {
    "shorter": {"beta": 0.001, "rate": 6e-4, "steps": 60, "grader": {"type": "regex", "pattern": "^.{0,4}$"}},
    "hacked": {"beta": 0.001, "rate": 3e-4, "steps": 60, "grader": RUNS_OF_DIGITS},
    "healthy": {"beta": 0.02, "rate": 1e-6, "steps": 60, "grader": {"type": "regex", "pattern": "^[0-4]"}},
    "adaptive": {"beta": OVERSHOOTING, "rate": 3e-4, "steps": 80, "grader": RUNS_OF_DIGITS},
}


def settings(run: dict[str, Any]) -> dict[str, Any]:
    """Below `method.grpo`: what differs from the tiny job of the engine's tests."""
    return {
        "beta": run["beta"],
        "optimizer": {"learning_rate": run["rate"], "warmup_steps": 0},
        "limits": {"num_steps": run["steps"]},
        "grader": run["grader"],
        "sampling": {"group_size": 8, "prompts_per_step": 4, "max_completion_tokens": 24},
        "checkpoints": {"resume_every": 1_000_000},
    }


def main() -> None:
    """Record every run."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        root = make_job(Path(directory))
        recorded = {name: keep(train(root, name, make_spec(root, **settings(RUNS[name])))) for name in RUNS}
    write(TARGET, recorded)


if __name__ == "__main__":
    main()
