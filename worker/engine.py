"""One engine process: started in a session of its own, watched, ended with everything it spawned."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from worker import launch
from worker.processes import (
    EPOCH_VARIABLE,
    JOB_VARIABLE,
    RUN_VARIABLE,
    SUPERVISOR_VARIABLE,
    SURVIVED_S,
    CannotEnd,
    Identity,
    end_attempt,
    identify,
    signal_attempt,
    start_time,
)

log = logging.getLogger(__name__)

ENGINE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "grpo_engine")
OOM_SCORE_ADJ = 500
LOG_LIMIT_BYTES = 16 * 2**20
LOG_TAIL_BYTES = 4 * 2**20


class RunPlace(Protocol):
    """Where an engine runs, and under which badge: an attempt, or a probe."""

    job_id: str
    epoch: int
    path: Path
    log_path: Path

    def write_run(self, engine: Identity | None) -> None:
        """Note who supervises and which process is the engine."""


class Engine:
    """The running engine of an attempt. Start it from the main thread: the parent-death signal follows the thread."""

    def __init__(self, attempt: RunPlace, environment: Mapping[str, str], command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.attempt = attempt
        badge = {
            JOB_VARIABLE: attempt.job_id,
            EPOCH_VARIABLE: str(attempt.epoch),
            RUN_VARIABLE: str(attempt.path),
            SUPERVISOR_VARIABLE: f"{os.getpid()}:{start_time(os.getpid())}",
        }
        launcher = [sys.executable, "-I", "-S", launch.__file__, "--parent", str(os.getpid()), "--oom-score-adj", str(OOM_SCORE_ADJ), "--"]
        with attempt.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [*launcher, *command, str(attempt.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **badge},
                start_new_session=True,
                close_fds=True,
            )
        try:
            self.identity: Identity | None = identify(self._process.pid)
            if self.identity is not None:
                attempt.write_run(self.identity)
        except BaseException:
            self.end(grace_s=0.0)
            raise
        self._cannot_cap = False

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most this long; True once the engine has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the engine and to everything it spawned."""
        if self._process.poll() is None:
            self._process.send_signal(signum)
        signal_attempt(self.attempt.job_id, self.attempt.epoch, signum)

    def end(self, grace_s: float) -> None:
        """No process of the attempt is left when this returns. SIGTERM first, SIGKILL after `grace_s`.

        Raises CannotEnd when one survives SIGKILL for `SURVIVED_S`, as a process does that hangs in a driver.
        """
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            if not self.wait(grace_s):
                self.signal(signal.SIGKILL)
                if not self.wait(SURVIVED_S):
                    raise CannotEnd(f"process {self._process.pid} has survived SIGKILL for {SURVIVED_S:g} s")
        end_attempt(self.attempt.job_id, self.attempt.epoch, grace_s=min(grace_s, 1.0))

    def cap_log(self) -> None:
        """Keep engine.log bounded. A disk that refuses is reported once; training goes on."""
        try:
            cap_log(self.attempt.log_path, LOG_LIMIT_BYTES, LOG_TAIL_BYTES)
        except OSError as error:
            if not self._cannot_cap:
                log.warning("%s: engine.log cannot be shortened: %s", self.attempt, error)
            self._cannot_cap = True


def cap_log(path: Path, limit_bytes: int, tail_bytes: int) -> int:
    """Shorten a log that its writer holds open in append mode: beyond the limit its tail moves to `<name>.1`.

    Returns how many bytes were dropped for good. Raises OSError; room is made first, so that a full disk is relieved.
    """
    size = path.stat().st_size
    if size <= limit_bytes:
        return 0
    with path.open("rb") as file:
        file.seek(-tail_bytes, os.SEEK_END)
        tail = file.read(tail_bytes)
    dropped = size - len(tail)
    os.truncate(path, 0)
    path.with_name(path.name + ".1").write_bytes(tail)
    with path.open("ab") as file:
        file.write(f"[log shortened: {dropped} bytes dropped, the last {len(tail)} before this line are in {path.name}.1]\n".encode())
    return dropped
