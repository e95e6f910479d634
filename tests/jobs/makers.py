"""Small real things for the bookkeeper's tests: specs, uploads, engine events, and a worker that plays by the rules."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from grpo_engine.contract.event import EngineEvent, Outcome
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.job import JobSpec
from jobs.artifacts import Artifacts
from jobs.ledger import JobRecord, Ledger


def make_spec(**changes: Any) -> JobSpec:
    """A valid spec; `grpo` among the changes is merged into the method."""
    grpo = {"grader": {"type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
                       "operation": "eq"}, **changes.pop("grpo", {})}  # fmt: skip
    return resolve_spec({"model": "tiny", "training_file": "file-a", "method": {"type": "grpo", "grpo": grpo}, **changes})


def make_upload(ledger: Ledger) -> Path:
    """An uploaded training file."""
    path = ledger.artifacts.file_content("file-a")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"prompt":"1+1","answer":"2"}\n')
    return path


def make_job(ledger: Ledger, **changes: Any) -> JobRecord:
    """An accepted job."""
    return ledger.create_job(make_spec(**changes), training_path=make_upload(ledger))


class FakeAttempt:
    """A scripted engine and worker: writes what they write, where they write it."""

    def __init__(self, artifacts: Artifacts, job_id: str, epoch: int) -> None:
        self.artifacts = artifacts
        self.job_id = job_id
        self.epoch = epoch
        self.seq = 0
        self.path = artifacts.attempt_dir(job_id, epoch)
        self.events: list[EngineEvent] = []

    def claim(self, worker: str = "w1") -> bool:
        return self.artifacts.claim(self.job_id, self.epoch, worker)

    def event(
        self, kind: str, step: int | None = None, content: dict[str, Any] | None = None, /, *, is_written: bool = True, **data: Any
    ) -> EngineEvent:
        """The next event, appended to events.jsonl unless `is_written` is false."""
        self.seq += 1
        event = EngineEvent(
            epoch=self.epoch, seq=self.seq, time=1000.0 + self.seq, type=kind, step=step, message=kind, data={**(content or {}), **data}
        )
        if is_written:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.artifacts.events_path(self.job_id, self.epoch).open("a") as stream:
                stream.write(event.to_line() + "\n")
        self.events.append(event)
        return event

    def step(self, number: int, metrics: dict[str, Any] | None = None, *, is_written: bool = True) -> EngineEvent:
        """`step.completed`."""
        values = {"kl/ref/k3/mean": 0.01 * number, "beta/applied": 0.04, **(metrics or {})}
        return self.event("step.completed", number, is_written=is_written, metrics=values, beta={"value": 0.04, "step": number})

    def checkpoint(self, step: int, kind: str = "resume", content: bytes = b"weights") -> EngineEvent:
        """A complete checkpoint directory and its event."""
        name = f"{'step' if kind == 'published' else 'resume'}-{step:06d}"
        directory = self.path / "checkpoints" / name
        directory.mkdir(parents=True)
        content = content + name.encode()
        (directory / "model.safetensors").write_bytes(content)
        member = {"name": "model.safetensors", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (directory / "manifest.json").write_text(json.dumps({"name": name, "step": step, "kind": kind, "files": [member]}))
        return self.event(
            "checkpoint.saved",
            step,
            name=name,
            step=step,
            kind=kind,
            files=[member],
            bytes=len(content),
            ref_kl=0.5,
            reward=0.25,
            beta=0.04,
        )

    def end(self, status: str, reason: str, *, retryable: bool = False, last_step: int = 0, message: str = "") -> None:
        """outcome.json."""
        outcome = {"status": status, "reason": reason, "message": message or reason, "retryable": retryable, "last_step": last_step}
        self.artifacts.write_outcome(self.job_id, self.epoch, Outcome.model_validate_json(json.dumps(outcome)))
