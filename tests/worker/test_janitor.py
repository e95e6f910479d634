"""Engines of dead workers are ended and settled; everybody else is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.worker.room import Room, wait_for
from worker.attempt import Attempt
from worker.janitor import sweep
from worker.processes import Identity, boot_id, home, identify

SLEEP = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL); print('up', flush=True); time.sleep(600)",
)


class Processes:
    """Sleepers with chosen environments."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, badge: Mapping[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(SLEEP, env={**os.environ, **badge}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


def gone() -> Identity:
    """The identity of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    process.communicate(b"\n")
    assert identity is not None
    return identity


def begun(room: Room, supervisor: Identity, engine: Identity | None = None) -> Attempt:
    attempt = room.job()
    attempt.path.mkdir(parents=True)
    run = {"supervisor": supervisor.to_dict(), **(engine.to_dict() if engine else {})}
    (attempt.path / "run.json").write_text(json.dumps(run))
    return attempt


def badge(attempt: Attempt, supervisor: Identity, run_dir: Path | None = None) -> dict[str, str]:
    return {
        "GRPO_JOB_ID": attempt.job_id,
        "GRPO_EPOCH": "1",
        "GRPO_RUN_DIR": str(run_dir or attempt.path),
        "GRPO_SUPERVISOR": f"{supervisor.pid}:{supervisor.starttime}",
    }


def test_an_orphan_is_ended_and_its_attempt_settled(room: Room, processes: Processes) -> None:
    dead = gone()
    attempt = begun(room, dead)
    orphan = processes.start(badge(attempt, dead))
    assert [touched.job_id for touched in sweep(room.artifacts, grace_s=2)] == [attempt.job_id]
    assert orphan.wait(timeout=5) == -15
    outcome = attempt.outcome()
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("failed", "worker_lost")


def test_an_attempt_without_any_process_left_is_settled_too(room: Room) -> None:
    attempt = begun(room, gone(), gone())
    sweep(room.artifacts, grace_s=2)
    assert attempt.outcome() is not None
    assert sweep(room.artifacts, grace_s=2) == []


def test_an_engine_of_a_living_worker_is_left_alone(room: Room, processes: Processes) -> None:
    me = identify(os.getpid())
    assert me is not None
    attempt = begun(room, me)
    engine = processes.start(badge(attempt, me))
    assert sweep(room.artifacts, grace_s=2) == []
    assert engine.poll() is None
    engine.kill()


def test_an_engine_of_another_data_directory_is_left_alone(room: Room, processes: Processes, tmp_path: Path) -> None:
    elsewhere = processes.start(badge(room.job(), gone(), run_dir=tmp_path / "other" / "jobs" / "x" / "attempts" / "1"))
    assert sweep(room.artifacts, grace_s=2) == []
    assert elsewhere.poll() is None


@pytest.mark.parametrize("change", ["starttime", "boot"])
def test_a_stranger_that_got_the_old_pid_is_left_alone(room: Room, processes: Processes, change: str) -> None:
    stranger = processes.start({})
    now = identify(stranger.pid)
    assert now is not None
    old = Identity(
        pid=stranger.pid,
        starttime=now.starttime - 1 if change == "starttime" else now.starttime,
        boot="another boot" if change == "boot" else boot_id(),
        home=home(),
    )
    attempt = begun(room, gone(), engine=old)
    sweep(room.artifacts, grace_s=2)
    assert attempt.outcome() is not None
    assert stranger.poll() is None


def test_an_engine_whose_environment_was_overwritten_is_known_by_its_run_file(room: Room, processes: Processes) -> None:
    engine = processes.start({})
    identity = identify(engine.pid)
    assert identity is not None
    begun(room, gone(), engine=identity)
    sweep(room.artifacts, grace_s=2)
    assert engine.wait(timeout=5) == -15


def test_attempts_of_another_host_are_not_judged(room: Room) -> None:
    dead = gone()
    attempt = begun(room, Identity(dead.pid, dead.starttime, dead.boot, home="another-host pid:[1]"))
    assert sweep(room.artifacts, grace_s=2) == []
    assert attempt.outcome() is None


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    assert identity is not None
    assert identity.is_alive()
    assert process.stdin is not None
    process.stdin.close()
    wait_for(lambda: not identity.is_alive(), "the process to end")
    process.wait()
