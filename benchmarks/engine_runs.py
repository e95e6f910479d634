"""Short runs of the engine on the arithmetic example for the benchmarks beside this file: their steps and their peak memory."""

from __future__ import annotations

import copy
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = json.loads((ROOT / "examples" / "arithmetic.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    steps: list[dict[str, float]]
    """Metrics by step, the first step first."""
    times: list[float]
    """When each step was reported, seconds since the epoch."""
    peak_bytes: int
    """Largest resident size of the process."""


def run(num_steps: int, **sections: Any) -> Run:
    """Train the example for some steps in a process of its own; keyword arguments extend sections of `method.grpo`."""
    spec = copy.deepcopy(EXAMPLE)
    grpo = spec["method"]["grpo"]
    for name, section in {"limits": {"num_steps": num_steps}, "checkpoints": {"resume_every": 1_000_000}, **sections}.items():
        is_part = isinstance(section, dict) and name not in ("beta", "grader")
        grpo[name] = {**grpo.get(name, {}), **section} if is_part else section
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        dispatch = {"spec": spec, "training_file": str(ROOT / "examples" / "arithmetic.jsonl")}
        (run_dir / "dispatch.json").write_text(json.dumps(dispatch), encoding="utf-8")
        pid = os.posix_spawn(sys.executable, [sys.executable, "-m", "grpo_engine", folder], {**os.environ, "PYTHONPATH": str(ROOT)})
        _, status, usage = os.wait4(pid, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit((run_dir / "events.jsonl").read_text()[-2000:])
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    done = [event for event in events if event["type"] == "step.completed"]
    return Run([event["data"]["metrics"] for event in done], [event["time"] for event in done], usage.ru_maxrss * 1024)


def report(name: str, result: dict[str, Any]) -> None:
    """Print the result and keep it beside the script, with the machine's facts."""
    import torch

    facts = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    whole = {"when": time.strftime("%Y-%m-%d", time.gmtime()), "machine": {**facts, "threads": torch.get_num_threads()}, **result}
    text = json.dumps(whole, indent=1)
    Path(__file__).with_name(f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)
