"""A scripted engine: speaks the contract like the real one, and misbehaves on request.

`python fake_engine.py RUN_DIR`. The script is in `spec.metadata["script"]` of dispatch.json, words separated by blanks:
steps=N, step_s=S, ignore_sigterm, helper (a process outside the group that ignores SIGTERM), flood=MIB, exit=CODE@STEP,
signal=NAME@STEP, absurd_seq@STEP, hang@STEP.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_engine.contract.command import Command, Dispatch
from grpo_engine.contract.event import EXIT_STOPPED, EngineEvent, Outcome

HELPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class FakeEngine:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.dispatch = Dispatch.model_validate_json((run_dir / "dispatch.json").read_bytes())
        words = self.dispatch.spec.metadata.get("script", "").split()
        self.script = {word.partition("=")[0]: word.partition("=")[2] for word in words}
        self.seq = 0
        self.seen = 0

    def emit(self, kind: str, step: int | None = None, /, *, seq: int | None = None, **data: Any) -> None:
        self.seq += 1
        event = EngineEvent(epoch=self.dispatch.epoch, seq=seq or self.seq, time=time.time(), type=kind, step=step, message=kind, data=data)
        with (self.run_dir / "events.jsonl").open("a") as file:
            file.write(event.to_line() + "\n")

    def at(self, word: str, step: int) -> str | None:
        for key, value in self.script.items():
            text = f"{key}={value}" if value else key
            head, _, when = text.partition("@")
            if when == str(step) and head.split("=")[0] == word:
                return head.partition("=")[2]
        return None

    def commands(self) -> list[Command]:
        path = self.run_dir / "commands.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        new, self.seen = lines[self.seen :], len(lines)
        return [Command.model_validate_json(line) for line in new]

    def finish(self, outcome: Outcome) -> None:
        draft = self.run_dir / ".outcome"
        draft.write_text(outcome.model_dump_json())
        draft.rename(self.run_dir / "outcome.json")

    def run(self) -> int:
        if "ignore_sigterm" in self.script:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "helper" in self.script:
            subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
        for _ in range(int(self.script.get("flood", 0))):
            print("x" * (2**20 - 1))
        self.emit("engine.started", pid=os.getpid(), environment={key: os.environ[key] for key in os.environ if "GRPO" in key})
        steps = int(self.script.get("steps", 3))
        for step in range(1, steps + 1):
            for command in self.commands():
                if command.type in ("pause", "drain"):
                    return self.stop(command, step - 1)
                self.emit("control.applied", step, command=command.number, effective_step=step, old={}, new=command.model_dump())
            self.misbehave(step)
            time.sleep(float(self.script.get("step_s", 0.02)))
            self.emit("step.completed", step, metrics={"reward/mean": 0.5}, beta={})
        outcome = Outcome(status="succeeded", reason="completed", message="done", retryable=False, last_step=steps)
        self.emit("run.finished", steps, **json.loads(outcome.model_dump_json()))
        self.finish(outcome)
        return 0

    def stop(self, command: Command, last: int) -> int:
        name = f"resume-{last:06d}"
        self.emit("checkpoint.saved", last, name=name, step=last, kind="resume", files=[], bytes=0)
        self.emit("control.applied", last, command=command.number, effective_step=last, old={}, new={})
        outcome = Outcome(status="stopped", reason=command.type, message="stopped", retryable=True, last_step=last, resume_checkpoint=name)
        self.finish(outcome)
        return EXIT_STOPPED

    def misbehave(self, step: int) -> None:
        if (code := self.at("exit", step)) is not None:
            sys.exit(int(code))
        if (name := self.at("signal", step)) is not None:
            os.kill(os.getpid(), signal.Signals[name])
        if self.at("absurd_seq", step) is not None:
            self.emit("step.completed", step, seq=2**53)
            self.seq -= 1
        if self.at("hang", step) is not None:
            time.sleep(600)


if __name__ == "__main__":
    sys.exit(FakeEngine(Path(sys.argv[1])).run())
