"""Run directories for tiny jobs, and what a finished run left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_engine.__main__ import run
from grpo_engine.contract.event import EngineEvent, Outcome
from tests.tiny import make_model

TIMING = ("time/", "throughput/")
DEADLINE_S = 90


def make_job(root: Path, kind: str = "TINY_SHORT", **model: Any) -> Path:
    """A tiny model and 16 sums below `root`, for any number of runs."""
    make_model(root / "model", kind, **model)
    rows = [{"messages": [{"role": "user", "content": f"{a}+{b}="}], "reference_answer": str(a + b)} for a in range(4) for b in range(4)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def make_spec(root: Path, **grpo: Any) -> dict[str, Any]:
    """A raw spec; keyword arguments replace or extend sections of `method.grpo`."""
    sections: dict[str, Any] = {
        "beta": {"rule": "deadband", "value": 0.04, "target": 0.02, "min": 0.01, "update_every": 1, "ema_decay": None},
        "sampling": {"group_size": 4, "prompts_per_step": 3, "max_completion_tokens": 8},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        "grader": {"type": "regex", "pattern": "^[0-4]"},
        "checkpoints": {"resume_every": 3},
        "limits": {"num_steps": 6},
        "resources": {"precision": "fp32", "device": "cpu"},
    }
    for name, section in grpo.items():
        is_part = isinstance(section, dict) and name not in ("beta", "grader", "kl")
        sections[name] = {**sections.get(name, {}), **section} if is_part else section
    return {"model": str(root / "model"), "seed": 7, "method": {"type": "grpo", "grpo": sections}}


def make_run(root: Path, name: str = "1", spec: dict[str, Any] | None = None, **dispatch: Any) -> Path:
    """An attempt directory with its dispatch."""
    run_dir = root / "attempts" / name
    run_dir.mkdir(parents=True)
    body = {"spec": spec or make_spec(root), "training_file": str(root / "rows.jsonl"), **dispatch}
    (run_dir / "dispatch.json").write_text(json.dumps(body))
    return run_dir


def train(root: Path, name: str = "1", spec: dict[str, Any] | None = None, **dispatch: Any) -> Path:
    """Run an attempt in this process to its end and return its directory."""
    run_dir = make_run(root, name, spec, **dispatch)
    run(run_dir)
    return run_dir


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    """Run an attempt in a process of its own."""
    with (run_dir / "engine.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "grpo_engine", str(run_dir)], stdout=log, stderr=log)


def kill_when(run_dir: Path, seen: str) -> None:
    """Run an attempt and SIGKILL it as soon as its events hold a text."""
    process = start(run_dir)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while seen not in text_of(run_dir):
            assert process.poll() is None, (run_dir / "engine.log").read_text()
            assert time.monotonic() < deadline, f"{seen} did not appear"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def text_of(run_dir: Path) -> str:
    """The events so far as text."""
    path = run_dir / "events.jsonl"
    return path.read_text() if path.exists() else ""


def events(run_dir: Path, kind: str | None = None) -> list[EngineEvent]:
    """The events of an attempt, all of them whole and contiguous."""
    found = [EngineEvent.model_validate_json(line) for line in text_of(run_dir).splitlines() if line.endswith("}")]
    assert [event.seq for event in found] == list(range(1, len(found) + 1))
    return [event for event in found if kind in (None, event.type)]


def outcome(run_dir: Path) -> Outcome:
    """The verdict."""
    return Outcome.model_validate_json((run_dir / "outcome.json").read_bytes())


def series(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step, without times."""
    return {
        event.step or 0: {name: value for name, value in event.data["metrics"].items() if not name.startswith(TIMING)}
        for event in events(run_dir, "step.completed")
    }


def weights_sha256(run_dir: Path, step: int) -> str:
    """SHA-256 of the published weights of a step, from its manifest."""
    manifest = json.loads((run_dir / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())
    return next(str(entry["sha256"]) for entry in manifest["files"] if entry["name"] == "model.safetensors")
