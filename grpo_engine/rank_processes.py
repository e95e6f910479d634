"""Several processes for one job: started together, ended together. Torch-free.

The parent starts one process a rank and watches them. They stay in its session and process group, carry its environment and
die with it (PR_SET_PDEATHSIG on Linux). The first rank writes events, checkpoints and the verdict. When a rank dies before
that, the parent ends the others and writes the verdict itself, naming the rank.

Over several hosts each has a parent and as many ranks, all with the same attempt directory. The parent on the first host has the
verdict; the others only note why a rank of theirs ended. When a rank dies on one host, those of the other hosts miss it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_engine.contract.command import Hosts
from grpo_engine.contract.event import EXIT_STOPPED, EXIT_SUCCEEDED, EngineEvent, Outcome, Progress, signal_name
from grpo_engine.events import EVENTS_FILE
from grpo_engine.outcome import OUTCOME_FILE, ConfigError, exit_code, write_outcome

LAST_WORDS_S = 5.0
"""How long the others may take to end by themselves after a rank has failed."""
TERM_S = 2.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
LOST = "rank_lost"
"""Reason of a verdict that only says that another rank did not answer."""


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """A rank's place among the ranks of its job."""

    rank: int
    size: int
    meet: str
    """Where the ranks find each other: a file on one host, `host:port` of the first rank over several."""
    hosts: int = 1
    interface: str = LOOPBACK
    """Network interface, or an address of it, over which ranks talk on the CPU."""

    @property
    def here(self) -> int:
        """Ranks on each host."""
        return self.size // self.hosts

    @property
    def local(self) -> int:
        """This rank's number among those of its host."""
        return self.rank % self.here


def seat_arguments(seat: Seat, parent: int) -> list[str]:
    """Command line of a rank, as `python -m grpo_engine` reads it."""
    numbers = {"--rank": seat.rank, "--ranks": seat.size, "--hosts": seat.hosts, "--parent": parent}
    words = [word for name, number in numbers.items() for word in (name, str(number))]
    return [*words, "--meet", seat.meet, "--interface", seat.interface]


def add_seat_arguments(parser: argparse.ArgumentParser) -> None:
    """What `seat_arguments` writes, for the engine's own use, and what an operator starts the other hosts' ranks with."""
    for name in ("--rank", "--ranks", "--parent", "--hosts"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--host", type=int, default=0, help="number of this host among those of the job; the first, 0, is the worker's")
    parser.add_argument("--interface", help="network interface of this host for its ranks; default: the one the dispatch names")


def seat_of(options: argparse.Namespace) -> Seat | None:
    """The place these arguments name; None in the process a person or the worker starts."""
    if options.rank is None:
        return None
    return Seat(options.rank, options.ranks, options.meet, options.hosts, options.interface)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank did not answer: ours, torch's own kind, or gloo's RuntimeError. Without torch."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"RankLost", "DistError"}) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def die_with(parent: int) -> None:
    """Have this process killed when its parent dies; end now when it is dead already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("grpo_engine: the process that started this rank is gone")


def verdict_path(run_dir: Path, rank: int) -> Path:
    """Where a rank that cannot go on leaves its verdict for the parent."""
    return run_dir / f"rank-{rank}.json"


def leave_verdict(run_dir: Path, rank: int, outcome: Outcome) -> None:
    """Tell the parent why this rank ends."""
    verdict_path(run_dir, rank).write_text(json.dumps(outcome.model_dump()), encoding="utf-8")


def run_ranks(run_dir: Path, size: int, hosts: Hosts | None = None, host: int = 0, interface: str | None = None) -> int:
    """Run this host's ranks of a job of `size`. Returns the exit code that belongs to the verdict.

    Raises ConfigError when the ranks cannot be divided equally over the hosts, or there is no such host.
    """
    count = 1 if hosts is None else hosts.count
    if size % count:
        raise ConfigError(f"{size} ranks cannot be divided equally over {count} hosts; ask for a multiple", param="method.grpo.resources")
    if not 0 <= host < count:
        raise ConfigError(f"the job has no host number {host}: its dispatch names {count}, counted from 0")
    with tempfile.TemporaryDirectory(prefix="grpo-ranks-") as folder:
        meet = f"{folder}/meet" if hosts is None else hosts.address
        talk = LOOPBACK if hosts is None else interface or hosts.interface
        seats = [Seat(rank, size, meet, count, talk) for rank in range(host * size // count, (host + 1) * size // count)]
        crew = Crew(run_dir, seats)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, crew.on_signal)
        try:
            crew.watch()
        finally:
            crew.end()
    if crew.signalled is not None:
        signal.signal(crew.signalled, signal.SIG_DFL)
        os.kill(os.getpid(), crew.signalled)
    if host > 0:
        return _note_losses(run_dir, size, crew.ended)
    if not (run_dir / OUTCOME_FILE).exists():
        write_outcome(run_dir, verdict(run_dir, size, crew.ended))
    return exit_code(Outcome.model_validate_json((run_dir / OUTCOME_FILE).read_bytes()))


def _note_losses(run_dir: Path, size: int, ended: Mapping[int, int]) -> int:
    """For the parent on the first host: why ranks of this host ended without a word of their own. Returns the exit code."""
    for rank, status in ended.items():
        if status not in (EXIT_SUCCEEDED, EXIT_STOPPED) and not verdict_path(run_dir, rank).exists():
            _, why = _unexplained(size, {rank: status}, {})
            leave_verdict(run_dir, rank, Outcome(status="failed", reason="crash", message=why, retryable=True, last_step=0))
    return next((abs(status) for status in ended.values() if status not in (EXIT_SUCCEEDED, EXIT_STOPPED)), EXIT_SUCCEEDED)


class Crew:
    """The running ranks of a job."""

    def __init__(self, run_dir: Path, seats: Sequence[Seat]) -> None:
        self.signalled: int | None = None
        self.ended: dict[int, int] = {}
        """Exit statuses of the ranks that ended by themselves, negative for a signal, in the order in which they were seen to."""
        command = [sys.executable, "-m", "grpo_engine", str(run_dir)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for seat in seats:
                arguments = seat_arguments(seat, os.getpid())
                self._processes[seat.rank] = subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL)
        except BaseException:
            self.end()
            raise

    def on_signal(self, signum: int, frame: object) -> None:
        """Remember to end everything."""
        self.signalled = signum

    def watch(self) -> None:
        """Return when every rank has ended, when a signal came, or when a rank failed and the others did not follow in time."""
        deadline = math.inf
        while self.signalled is None and len(self.ended) < len(self._processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            for rank, process in self._processes.items():
                if rank in self.ended or (status := process.poll()) is None:
                    continue
                self.ended[rank] = status
                if status not in (EXIT_SUCCEEDED, EXIT_STOPPED):  # after an orderly end the first rank may still have to write
                    deadline = min(deadline, time.monotonic() + (0.0 if status < 0 else LAST_WORDS_S))

    def end(self) -> None:
        """No rank is left when this returns."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + TERM_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def verdict(run_dir: Path, size: int, ended: Mapping[int, int]) -> Outcome:
    """Why the ranks ended when the first of them wrote no verdict: the one that failed by itself, not those that missed it.

    `ended` has the exit statuses of those that were not ended by the parent.
    """
    came = progress(run_dir)
    far: dict[str, Any] = {"last_step": came.last_step, "resume_checkpoint": came.resume_checkpoint}
    left = {}
    for rank in range(size):
        path = verdict_path(run_dir, rank)
        if path.is_file():
            left[rank] = Outcome.model_validate_json(path.read_bytes())
    own = [rank for rank, outcome in left.items() if outcome.reason != LOST]
    if own:
        failed = left[own[0]]
        message = f"rank {own[0]} of {size}: {failed.message}"
        return failed.model_copy(update={"message": message, **far})
    reason, message = _unexplained(size, ended, left)
    return Outcome(status="failed", reason=reason, message=message, retryable=True, **far)


def _unexplained(size: int, ended: Mapping[int, int], left: Mapping[int, Outcome]) -> tuple[str, str]:
    """Reason and message when no rank has said more than that another did not answer."""
    for rank, status in ended.items():
        if status < 0:
            hint = "; the kernel does that when memory runs out" if status == -signal.SIGKILL else ""
            return "crash", f"rank {rank} of {size} was ended by {signal_name(-status)}{hint}; the other ranks were ended"
    for rank, status in ended.items():
        if rank not in left:
            return "crash", f"rank {rank} of {size} exited with status {status} and no verdict; engine.log has its last words"
    waited = " ".join(f"rank {rank}: {outcome.message}" for rank, outcome in left.items())
    silent = [str(rank) for rank in range(size) if rank not in ended]
    if silent:
        return LOST, f"rank {', '.join(silent)} of {size} did not answer and was ended ({waited})"
    return LOST, f"the ranks did not hear each other ({waited})"


def progress(run_dir: Path) -> Progress:
    """How far the attempt came, from its events."""
    found = Progress()
    path = run_dir / EVENTS_FILE
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            found = found.after(EngineEvent.model_validate_json(line))
    return found
