"""One child process of the embedded stack: its log, its end, and its restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A child that ran this long starts again with the first back-off."""
LOG_KEEP_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Plan:
    """How a child is started and how long it may take to leave."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    stop_grace_s: float
    pass_fds: tuple[int, ...] = ()


@dataclass
class Child:
    """A running, dead or resting child. All methods belong to the main thread: the child's life is bound to it."""

    plan: Plan
    say: Callable[[str], None]
    process: subprocess.Popen[bytes] | None = None
    _started_at: float = 0.0
    _backoff_s: float = FIRST_BACKOFF_S
    _restart_at: float | None = field(default=None)

    def start(self) -> None:
        """Start the process in a session of its own, so that the terminal's Ctrl-C reaches only its parent."""
        launcher = [sys.executable, "-m", "worker.launch", "--parent", str(os.getpid()), "--"]
        self.plan.log.parent.mkdir(parents=True, exist_ok=True)
        if self.plan.log.exists() and self.plan.log.stat().st_size > LOG_KEEP_BYTES:
            self.plan.log.replace(self.plan.log.with_name(self.plan.log.name + ".1"))
        with self.plan.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*launcher, *self.plan.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.plan.environment),
                pass_fds=self.plan.pass_fds,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        self._restart_at = None

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def tend(self) -> None:
        """Restart the process after it died, later each time."""
        if self.is_running or self.process is None:
            return
        now = time.monotonic()
        if self._restart_at is None:
            if now - self._started_at >= HEALTHY_AFTER_S:
                self._backoff_s = FIRST_BACKOFF_S
            how = ending(self.process.returncode)
            self.say(f"{self.plan.name} ended ({how}); starting it again in {self._backoff_s:g} s, log: {self.plan.log}")
            self._restart_at = now + self._backoff_s
            self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)
        elif now >= self._restart_at:
            self.start()
            self.say(f"{self.plan.name} is started again")

    def ask_to_stop(self) -> None:
        """SIGTERM, and no more restarts."""
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def last_words(self, lines: int = 12) -> str:
        """The end of the log."""
        return "\n".join(self.plan.log.read_text(errors="replace").splitlines()[-lines:])


def ending(returncode: int) -> str:
    """An exit status in words."""
    if returncode >= 0:
        return f"status {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
