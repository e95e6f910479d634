"""At worker start: end engines whose worker is dead, and settle their attempts. Strangers are left alone.

An engine is an orphan when the process that supervised it no longer runs on this host and boot. Engines of living
workers, of other data directories and of other hosts are not ours to judge; neither is a process that merely has a pid
from an old run file, because start time and boot must match as well.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path

import psutil

from grpo_engine.contract.event import Outcome
from jobs.artifacts import JOB_ID, Artifacts
from worker.attempt import Attempt
from worker.processes import SURVIVED_S, Badge, CannotEnd, end_attempt, engine_processes, start_time
from worker.tail import progress_of
from worker.verdict import worker_lost

log = logging.getLogger(__name__)


def sweep(artifacts: Artifacts, grace_s: float) -> list[Attempt]:
    """End every orphan of this data directory and settle its attempt; returns the attempts touched."""
    orphans: dict[tuple[str, int], Attempt] = {}
    for _, badge in engine_processes():
        if Path(badge.run_dir).is_relative_to(artifacts.jobs_dir) and not _is_supervised(badge):
            orphans[badge.job_id, badge.epoch] = Attempt(artifacts, badge.job_id, badge.epoch)
    for attempt in unsettled(artifacts):
        supervisor = attempt.supervisor()
        if supervisor is not None and supervisor.is_from_here and not supervisor.is_alive():
            orphans[attempt.job_id, attempt.epoch] = attempt
    for attempt in orphans.values():
        close_attempt(attempt, grace_s)
    return list(orphans.values())


def close_attempt(attempt: Attempt, grace_s: float) -> Outcome:
    """End what is left of an attempt whose supervisor died, and write its verdict if the engine left none."""
    engine = attempt.engine()
    try:
        ended = end_attempt(attempt.job_id, attempt.epoch, grace_s)
        if engine is not None and engine.is_alive():  # its environment could not be read
            ended = True
            _end_process(engine.pid, grace_s)
    except CannotEnd as error:  # fenced by its epoch all the same: the job goes on elsewhere
        log.error("%s: %s; it hangs in a driver or on a disk, and the host needs a hand", attempt, error)
        ended = False
    outcome = attempt.outcome() or attempt.settle(worker_lost(progress_of(attempt)))
    log.warning("%s: its worker died; %s, %s", attempt, "engine ended" if ended else "no engine was left", outcome.reason)
    return outcome


def unsettled(artifacts: Artifacts) -> list[Attempt]:
    """Attempts that were begun and have no verdict."""
    found = []
    for run in sorted(artifacts.jobs_dir.glob("*/attempts/*/run.json")):
        folder = run.parent
        if folder.name.isdecimal() and JOB_ID.fullmatch(folder.parent.parent.name) and not (folder / "outcome.json").exists():
            found.append(Attempt(artifacts, folder.parent.parent.name, int(folder.name)))
    return found


def _is_supervised(badge: Badge) -> bool:
    pid, _, started = badge.supervisor.partition(":")
    return pid.isdecimal() and str(start_time(int(pid))) == started


def _end_process(pid: int, grace_s: float) -> None:
    process = psutil.Process(pid)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while start_time(pid) is not None:
        if time.monotonic() >= deadline + SURVIVED_S:
            raise CannotEnd(f"process {pid} has survived SIGKILL for {SURVIVED_S:g} s")
        if time.monotonic() >= deadline:
            process.kill()
        time.sleep(0.05)


def main() -> None:
    """`python -m worker.janitor DATA_DIR`: one sweep, then exit."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m worker.janitor DATA_DIR")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sweep(Artifacts(Path(sys.argv[1])), grace_s=8.0)


if __name__ == "__main__":
    main()
