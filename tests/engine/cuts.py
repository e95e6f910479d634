"""What a SIGKILL at a chosen moment leaves on the disk, without killing: a copy of the run directory as it is right then.

Every event is in its file when `emit` returns, and a checkpoint is renamed into place whole, so a copy taken between two
of the engine's own operations is what its sudden death there would leave.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from grpo_engine.__main__ import run
from grpo_engine.checkpoint import read_resume
from grpo_engine.contract.event import EngineEvent
from grpo_engine.events import EventLog
from grpo_engine.outcome import CheckpointDamaged
from tests.engine.runs import TIMING, events, make_run

Moment = Callable[[EngineEvent], bool]


def run_with_cuts(run_dir: Path, cut_dir: Path, *, after: Moment | None = None, at_fsync: bool = False) -> list[Path]:
    """Run an attempt to its end; returns copies of its directory after the wanted events and, if asked, before every fsync."""
    cuts: list[Path] = []
    emit, fsync = EventLog.emit, os.fsync

    def cut() -> None:
        cuts.append(cut_dir / f"cut-{len(cuts):03d}" / "1")
        shutil.copytree(run_dir, cuts[-1])

    def emit_and_cut(log: EventLog, kind: str, message: str, **rest: Any) -> EngineEvent | None:
        event = emit(log, kind, message, **rest)
        if event is not None and after is not None and after(event):
            cut()
        return event

    def cut_and_fsync(descriptor: int) -> None:
        if not (run_dir / "outcome.json").exists():
            cut()
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventLog, "emit", emit_and_cut)
        if at_fsync:
            patch.setattr(os, "fsync", cut_and_fsync)
        run(run_dir)
    return cuts


def resume_point(attempts: list[Path]) -> Path | None:
    """The state the next attempt continues from, as the bookkeeper chooses: announced, not superseded, whole, and the newest."""
    announced: dict[Path, tuple[int, int, dict[str, Any]]] = {}
    for attempt in attempts:
        for event in events(attempt):
            if event.type == "run.rewound":
                announced = {path: found for path, found in announced.items() if found[0] <= event.data["to_step"]}
            elif event.type == "checkpoint.saved" and event.data["kind"] == "resume":
                path = attempt / "checkpoints" / event.data["name"]
                announced[path] = (event.data["step"], event.epoch, {entry["name"]: entry["sha256"] for entry in event.data["files"]})
    for path, (_, _, files) in sorted(announced.items(), key=lambda item: item[1][:2], reverse=True):
        try:
            manifest, _ = read_resume(path)
        except CheckpointDamaged:
            continue
        if {entry.name: entry.sha256 for entry in manifest.files} == files:
            return path
    return None


def go_on(root: Path, spec: dict[str, Any], attempts: list[Path], **dispatch: Any) -> Path:
    """Prepare the next attempt beside the earlier ones."""
    epoch, point = len(attempts) + 1, resume_point(attempts)
    home = attempts[0].parent
    body = {"spec": spec, "training_file": str(root / "rows.jsonl"), "epoch": epoch, **dispatch}
    run_dir = home / str(epoch)
    run_dir.mkdir()
    (run_dir / "dispatch.json").write_text(json.dumps({**body, "resume_from": None if point is None else str(point)}))
    return run_dir


def story(attempts: list[Path]) -> dict[int, dict[str, Any]]:
    """By step: metrics without times, the state of beta, and every completion in order; superseded steps are gone."""
    told: dict[int, dict[str, Any]] = {}
    for attempt in attempts:
        for event in events(attempt):
            if event.type == "run.rewound":
                told = {step: row for step, row in told.items() if step <= event.data["to_step"]}
            elif event.type == "step.completed" and event.step is not None:
                numbers = {name: value for name, value in event.data["metrics"].items() if not name.startswith(TIMING)}
                told[event.step] = {"metrics": numbers, "beta": event.data["beta"]}
        for path in sorted((attempt / "rollouts").glob("step-*.jsonl.zst")):
            step = int(path.name[5:].split(".")[0])
            if step in told:
                text = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=2**24).decode()
                told[step]["rollout"] = text
    return told


def acts(attempts: list[Path]) -> list[tuple[Any, ...]]:
    """What guardrails did, each once: a stretch done anew repeats its own acts."""
    found = {}
    for attempt in attempts:
        for event in events(attempt, "guardrail.acted"):
            found[event.data["count"]] = (event.data["action"], event.data["since"], event.data.get("to_step"), event.data.get("new"))
    return [found[count] for count in sorted(found)]


def final_weights(run_dir: Path) -> dict[str, str]:
    """SHA-256 of every published file of the last step, from the manifest."""
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    return {entry["name"]: entry["sha256"] for entry in manifest["files"]}


def first_attempt(root: Path, name: str, spec: dict[str, Any], **dispatch: Any) -> Path:
    """The directory of a first attempt, with a home of its own for those that follow."""
    return make_run(root, f"{name}/1", spec, **dispatch)
