"""A GPU that fails again and again, or whose process does not die, is given to no job until somebody releases it.

There is no GPU here: the listing is what nvidia-smi would say, and the engine says what torch says of a broken device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from grpo_engine.contract.event import Outcome
from grpo_engine.contract.resources import Resources
from jobs.notices import Notice
from tests.worker.room import FAKE_ENGINE, Room, wait_for
from worker import processes
from worker.gpus import VISIBLE, Gpus, NoHealthyGpu, main
from worker.tasks import NotStarted, carry_out

BROKEN = "AcceleratorError: CUDA error: unspecified launch failure"


def gpus(directory: Path, *devices: str) -> Gpus:
    return Gpus(directory, listing=lambda: list(devices), host="here")


def outcome(message: str, status: str = "failed") -> Outcome:
    return Outcome.model_validate_json(
        json.dumps({"status": status, "reason": "crash", "message": message, "retryable": True, "last_step": 0})
    )


def one(count: int = 1, device: str = "auto") -> Resources:
    return Resources.model_validate_json(json.dumps({"gpus": count, "device": device}))


def test_while_nothing_is_quarantined_the_environment_is_left_alone(tmp_path: Path) -> None:
    yard = gpus(tmp_path, "GPU-a", "GPU-b")
    assert yard.assign({"X": "1"}, one()).environment == {"X": "1"}
    assert yard.assign({"X": "1"}, one()).devices == ("GPU-a",)
    assert yard.assign({}, one(2)).devices == ("GPU-a", "GPU-b")
    assert yard.assign({}, one(4), hosts=2).devices == ("GPU-a", "GPU-b"), "the other host bears the other two"
    assert yard.assign({VISIBLE: "3,1,-1,0"}, one(2)).devices == ("3", "1")
    assert yard.assign({VISIBLE: ""}, one(0)).devices == ()
    assert yard.assign({}, one(0, "cpu")).devices == ()
    assert yard.assign({}, Resources(cpu_ranks=2)).devices == ()
    assert gpus(tmp_path).assign({}, one()).devices == ()


def test_two_failures_in_a_row_quarantine_a_device_and_a_good_end_between_them_does_not(tmp_path: Path) -> None:
    yard = gpus(tmp_path, "GPU-a", "GPU-b")
    assert yard.judge(["GPU-a"], outcome(BROKEN)) == []
    assert yard.judge(["GPU-a"], outcome("30 steps done", "succeeded")) == []
    assert yard.judge(["GPU-a"], outcome(BROKEN)) == []
    assert yard.judge(["GPU-a"], outcome("the engine was ended by SIGKILL")) == [], "says nothing about the device"
    assert yard.judge(["GPU-a"], outcome(BROKEN)) == ["GPU-a"]
    assert yard.judge(["GPU-a"], outcome(BROKEN)) == [], "said once"
    again = gpus(tmp_path, "GPU-a", "GPU-b")
    assert again.assign({"X": "1"}, one()).environment == {"X": "1", VISIBLE: "GPU-b"}
    assert again.assign({}, one()).devices == ("GPU-b",)
    with pytest.raises(NoHealthyGpu, match="2 GPUs are needed and 1 are not in quarantine"):
        again.assign({}, one(2))
    assert again.release("GPU-a")
    assert again.assign({}, one(2)).environment == {}


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate 2 GiB", "CUBLAS_STATUS_ALLOC_FAILED", "ValueError: rows"])
def test_what_the_job_is_to_blame_for_is_no_failure_of_the_device(tmp_path: Path, message: str) -> None:
    yard = gpus(tmp_path, "GPU-a")
    assert [yard.judge(["GPU-a"], outcome(message)) for _ in range(3)] == [[], [], []]


def test_many_at_once_lose_no_count(tmp_path: Path) -> None:
    """Each from a process's point of view: the note is read, changed and written under a lock."""
    devices = [f"GPU-{number}" for number in range(8)]
    threads = [threading.Thread(target=gpus(tmp_path).condemn, args=([device], "hung")) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(gpus(tmp_path).quarantined()) == devices


def smi(directory: Path, monkeypatch: pytest.MonkeyPatch, *devices: str) -> None:
    """A host whose nvidia-smi lists these."""
    program = directory / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n" + "".join(f"echo {device}\n" for device in devices))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.delenv(VISIBLE, raising=False)


ENGINE = """
import json, os, pathlib, sys
run = pathlib.Path(sys.argv[1])
(run / "seen").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
(run / "outcome.json").write_text(json.dumps({"status": "failed", "reason": "crash", "message": sys.argv[0] and MESSAGE,
    "retryable": True, "last_step": 0, "resume_checkpoint": None, "param": None}))
sys.exit(1)
"""


def test_the_next_job_gets_another_device_and_then_waits_unclaimed(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(tmp_path, monkeypatch, "GPU-a", "GPU-b")
    engine = tmp_path / "engine.py"
    engine.write_text(ENGINE.replace("MESSAGE", repr(BROKEN)))
    seen = []
    for _ in range(4):
        attempt = room.job()
        carry_out(attempt.job_id, 1, room.live, room.settings, "w", (sys.executable, str(engine)))
        seen.append((attempt.path / "seen").read_text())
    assert seen == ["all", "all", "GPU-b", "GPU-b"]
    found = [Notice.model_validate_json(text) for text in iter(room.live.take_notice, None)]
    quarantined = [notice.data["devices"] for notice in found if notice.type == "attempt.device_quarantined"]
    assert quarantined == [["GPU-a"], ["GPU-b"]]
    last = room.job()
    with pytest.raises(NotStarted, match=r"left to another worker.*in it: GPU-a, GPU-b"):
        carry_out(last.job_id, 1, room.live, room.settings, "w", FAKE_ENGINE)
    assert not last.is_claimed
    place = str(room.settings.data_dir)
    assert main([place]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["GPU-a", "GPU-b"]
    assert BROKEN in listed
    assert [main([place, "--release", "GPU-a"]) for _ in range(2)] == [0, 1]
    assert carry_out(last.job_id, 1, room.live, room.settings, "w", FAKE_ENGINE) is not None


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_process_that_survives_sigkill_costs_its_device_and_the_attempt_and_not_the_worker(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in an uninterruptible sleep cannot be made here; signals that do not arrive look the same."""
    smi(tmp_path, monkeypatch, "GPU-a")
    attempt = room.job()
    engine = tmp_path / "engine.py"
    engine.write_text("import signal\nwhile True: signal.pause()\n")

    def cancel() -> None:
        wait_for(lambda: attempt.engine() is not None, "the engine")
        room.live.set_wanted(attempt.job_id, 1, "cancel")

    with monkeypatch.context() as patch:
        patch.setattr("worker.supervisor.SURVIVED_S", 0.2)
        patch.setattr("worker.engine.SURVIVED_S", 0.2)
        patch.setattr("worker.engine.Engine.signal", lambda *_: None)
        settings = dataclasses.replace(room.settings, drain_grace_s=0.1, cancel_grace_s=0.1)
        thread = threading.Thread(target=cancel, daemon=True)
        thread.start()
        with pytest.raises(processes.CannotEnd):
            carry_out(attempt.job_id, 1, room.live, settings, "w", (sys.executable, str(engine)))
        thread.join()
    assert attempt.outcome() is not None
    assert list(Gpus(room.settings.data_dir).quarantined()) == ["GPU-a"]
    processes.end_attempt(attempt.job_id, 1, grace_s=0.0)
