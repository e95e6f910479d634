"""The `grpo` command in a process of its own, as a person types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """Ours without settings of the machine the tests run on."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GRPO_") and name not in ("REDIS_URL", "DATABASE_URL")}
    return {**bare, "COLUMNS": "200", **changes}


def grpo(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "api.cli", *arguments], cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=240
    )


def _hear_interrupts() -> None:
    """A shell's background job, such as a test run may be, ignores SIGINT and so do its children; a terminal's command does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command that keeps running, and what it has printed."""

    def __init__(self, *arguments: str, cwd: Path, **changes: str) -> None:
        self._output = cwd / f"output-{time.monotonic_ns()}"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "api.cli", *arguments],
                cwd=cwd,
                env=environment(**changes),
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_hear_interrupts,
            )
        self._family: dict[int, psutil.Process] = {}

    def text(self) -> str:
        return self._output.read_text()

    def wait_for(self, words: str, timeout_s: float = 90.0) -> str:
        """Wait until the words appear; returns all output so far."""
        deadline = time.monotonic() + timeout_s
        while words not in (text := self.text()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{text}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {words!r}:\n{text}"
            time.sleep(0.05)
        return text

    def family(self) -> list[psutil.Process]:
        """Every process it has started so far and that still lives."""
        if self.process.poll() is None:
            self._family.update({child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)})
        return [process for process in self._family.values() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def child(self, words: str) -> psutil.Process:
        """The process with these words in its command line."""
        return next(process for process in self.family() if words in " ".join(process.cmdline()))

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for the command to end by itself."""
        return self.process.wait(timeout_s)

    def close(self, **_: Any) -> None:
        """End it whatever happens."""
        family = self.family()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in family:
            if process.is_running():
                process.kill()
