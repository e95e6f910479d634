"""An engine that trains nothing and keeps every promise: steps, checkpoints, exact resume, commands, verdicts, in milliseconds.

`python scripted_engine.py RUN_DIR`. Its "weights" are a chain of SHA-256 over the steps, so a run that lost, repeated or
invented a step ends with other weights than one left alone. `spec.metadata["script"]` holds words separated by blanks:
`step_s=S`, `resume_every=N`, `ignore_sigterm`, `helper` (a process in a session of its own that ignores SIGTERM), and
mishaps `NAME@STEP` in the first attempt, `NAME@STEP!` in every one: a signal's name, `exit-CODE`, `hang`, `vanish`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_engine.contract.command import Command, Dispatch
from grpo_engine.contract.event import EXIT_STOPPED, EngineEvent, Outcome

HELPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def chain(steps: int) -> str:
    """The weights after so many steps."""
    digest = "start"
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest}/{step}".encode()).hexdigest()
    return digest


class ScriptedEngine:
    """One attempt."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.dispatch = Dispatch.model_validate_json((run_dir / "dispatch.json").read_bytes())
        words = self.dispatch.spec.metadata.get("script", "").split()
        self.script = dict(word.partition("=")[::2] for word in words if "@" not in word)
        self.mishaps = [word for word in words if "@" in word]
        self.num_steps = self.dispatch.spec.method.grpo.limits.num_steps
        self.seq, self.step, self.digest, self.seen = 0, 0, "start", 0
        self.newest: str | None = None

    def emit(self, kind: str, step: int | None = None, /, **data: Any) -> None:
        self.seq += 1
        event = EngineEvent(epoch=self.dispatch.epoch, seq=self.seq, time=time.time(), type=kind, step=step, message=kind, data=data)
        with (self.run_dir / "events.jsonl").open("a") as file:
            file.write(event.to_line() + "\n")

    def save(self, kind: str) -> None:
        """A checkpoint directory that is complete or absent, and its announcement."""
        name = f"{'step' if kind == 'published' else 'resume'}-{self.step:06d}"
        if name == self.newest:
            return
        parent = self.run_dir / "checkpoints"
        draft = parent / f".tmp-{name}"
        draft.mkdir(parents=True)
        (draft / "model.safetensors").write_text(self.digest)
        content = self.digest.encode()
        files = [{"name": "model.safetensors", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
        about = {"name": name, "step": self.step, "kind": kind, "files": files, "bytes": len(content)}
        manifest = {"format": 1, "epoch": self.dispatch.epoch, "job_id": self.dispatch.job_id, "created_at": time.time(), **about}
        (draft / "manifest.json").write_text(json.dumps(manifest))
        draft.rename(parent / name)
        self.emit("checkpoint.saved", self.step, **about)
        if kind == "resume":
            older, self.newest = self.newest, name
            if older is not None and not (self.run_dir / "outcome.json").exists():
                shutil.rmtree(parent / older)

    def restore(self) -> None:
        """Begin where the dispatch says."""
        if self.dispatch.resume_from is not None:
            folder = Path(self.dispatch.resume_from)
            self.step = json.loads((folder / "manifest.json").read_text())["step"]
            self.digest = (folder / "model.safetensors").read_text()
        if self.dispatch.epoch > 1:
            self.emit("run.rewound", self.step, to_step=self.step)

    def commands(self) -> list[Command]:
        path = self.run_dir / "commands.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        new, self.seen = lines[self.seen :], len(lines)
        return [Command.model_validate_json(line) for line in new]

    def finish(self, status: str, reason: str, code: int, *, retryable: bool) -> int:
        outcome = {"status": status, "reason": reason, "message": reason, "retryable": retryable, "last_step": self.step}
        verdict = Outcome.model_validate_json(json.dumps({**outcome, "resume_checkpoint": self.newest}))
        self.emit("run.finished", self.step, **outcome)
        draft = self.run_dir / ".outcome"
        draft.write_text(verdict.model_dump_json())
        draft.rename(self.run_dir / "outcome.json")
        return code

    def run(self) -> int:
        """To the end, or to the mishap the script asks for."""
        if "ignore_sigterm" in self.script:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "helper" in self.script:
            subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
        self.restore()
        self.emit("engine.started")
        while self.step < self.num_steps:
            for command in self.commands():
                if command.type in ("pause", "drain"):
                    self.save("resume")
                    return self.finish("stopped", command.type, EXIT_STOPPED, retryable=True)
                self.emit("control.applied", self.step + 1, command=command.number, effective_step=self.step + 1, old={}, new={})
            self.meet(self.step + 1)
            time.sleep(float(self.script.get("step_s", 0.01)))
            self.step += 1
            self.digest = hashlib.sha256(f"{self.digest}/{self.step}".encode()).hexdigest()
            value = int(self.digest[:8], 16) / 2**32
            metrics = {"reward/mean": value, "kl/ref/k3/mean": value / 10, "beta/applied": 0.04, "time/step_s": 0.01}
            self.emit("step.completed", self.step, metrics=metrics, beta={"beta": 0.04})
            if self.step < self.num_steps and self.step % int(self.script.get("resume_every", 2)) == 0:
                self.save("resume")
        self.save("published")
        return self.finish("succeeded", "completed", 0, retryable=False)

    def meet(self, step: int) -> None:
        """The mishap of a step, if it has one."""
        for word in self.mishaps:
            name, _, when = word.partition("@")
            if when.rstrip("!") != str(step) or (not when.endswith("!") and self.dispatch.epoch > 1):
                continue
            if name == "hang":
                time.sleep(600)
            elif name == "vanish":
                shutil.rmtree(self.run_dir)
            elif name.startswith("exit-"):
                sys.exit(int(name.removeprefix("exit-")))
            else:
                os.kill(os.getpid(), signal.Signals[name])


if __name__ == "__main__":
    sys.exit(ScriptedEngine(Path(sys.argv[1])).run())
