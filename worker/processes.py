"""Which processes belong to an attempt, and how they are ended.

A pid alone is reused by the kernel; a pid with its start time on one boot of one host is a process for good.
Membership is what a process carries in its environment (`GRPO_JOB_ID`, `GRPO_EPOCH`), so that helpers which left the
process group, and the ranks of a distributed run, are found as well.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

JOB_VARIABLE = "GRPO_JOB_ID"
EPOCH_VARIABLE = "GRPO_EPOCH"
SUPERVISOR_VARIABLE = "GRPO_SUPERVISOR"
"""Who watches over the process: `<pid>:<start time>`."""
RUN_VARIABLE = "GRPO_RUN_DIR"

SURVIVED_S = 60.0
"""A process that SIGKILL has not ended in this time hangs in the kernel: in a driver, or on a disk."""
_POLL_S = 0.05


class CannotEnd(Exception):
    """A process of an attempt does not die."""


@dataclass(frozen=True)
class Identity:
    """One process, told apart from every other that ever had its pid."""

    pid: int
    starttime: float
    """Clock ticks since boot on Linux, Unix seconds elsewhere."""
    boot: str
    """Which boot of the kernel it ran on."""
    home: str
    """Host name and process-id namespace: where the pid means something."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Identity | None:
        """What `to_dict` wrote, None for anything else."""
        try:
            return cls(int(content["pid"]), float(content["starttime"]), str(content["boot"]), str(content["home"]))
        except (KeyError, TypeError, ValueError):
            return None

    def to_dict(self) -> dict[str, Any]:
        """For JSON files."""
        return asdict(self)

    @property
    def is_from_here(self) -> bool:
        """Whether it ran on this host and in this pid namespace, so that it can be judged from here."""
        return self.home == home()

    def is_alive(self) -> bool:
        """Whether this very process still runs here. A zombie does not."""
        return self.is_from_here and self.boot == boot_id() and start_time(self.pid) == self.starttime


def identify(pid: int) -> Identity | None:
    """The identity of a running process, None when there is none."""
    started = start_time(pid)
    return None if started is None else Identity(pid, started, boot_id(), home())


def start_time(pid: int) -> float | None:
    """When a process started; None when it is gone or a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in ("Z", "X") else float(fields[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def boot_id() -> str:
    """Changes with every boot where the system says so, else empty."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def home() -> str:
    """Where pids are meaningful: the host name, with the pid namespace where there are such."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def carriers(job_id: str, epoch: int) -> list[psutil.Process]:
    """Living processes of one attempt."""
    return [process for process, found in engine_processes() if (found.job_id, found.epoch) == (job_id, epoch)]


@dataclass(frozen=True)
class Badge:
    """What an engine process carries in its environment."""

    job_id: str
    epoch: int
    supervisor: str
    run_dir: str


def engine_processes() -> list[tuple[psutil.Process, Badge]]:
    """Every process on this host that carries a badge and may be looked at."""
    found = []
    for process in psutil.process_iter():
        try:
            badge = _badge(process.environ())
        except psutil.Error:
            continue  # gone in the meantime, a zombie, or another user's: none of ours
        if badge is not None:
            found.append((process, badge))
    return found


def _badge(environment: dict[str, str]) -> Badge | None:
    job_id, epoch = environment.get(JOB_VARIABLE), environment.get(EPOCH_VARIABLE, "")
    if not job_id or not epoch.isdecimal():
        return None
    return Badge(job_id, int(epoch), environment.get(SUPERVISOR_VARIABLE, ""), environment.get(RUN_VARIABLE, ""))


def signal_attempt(job_id: str, epoch: int, signum: signal.Signals) -> int:
    """Send a signal to every process of the attempt; returns how many there were."""
    members = carriers(job_id, epoch)
    for process in members:
        _send(process, signum)
    return len(members)


def end_attempt(job_id: str, epoch: int, grace_s: float) -> bool:
    """SIGTERM, then SIGKILL after `grace_s`, until no process of the attempt is left. Returns whether there were any.

    A process that begins while this runs is found by the next look. Raises CannotEnd when one survives SIGKILL for `SURVIVED_S`.
    """
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    found = False
    while members := carriers(job_id, epoch):
        found = True
        overdue = time.monotonic() >= deadline
        if time.monotonic() >= deadline + SURVIVED_S:
            raise CannotEnd(f"processes {[process.pid for process in members]} have survived SIGKILL for {SURVIVED_S:g} s")
        for process in members:
            if overdue:
                _send(process, signal.SIGKILL)
            elif process.pid not in asked:
                asked.add(process.pid)
                _send(process, signal.SIGTERM)
        time.sleep(_POLL_S)
    return found


def _send(process: psutil.Process, signum: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
