"""The foreman's small parts, one idea each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.contract.error import Unavailable
from grpo_engine.contract.event import EngineEvent, Progress
from jobs.artifacts import Artifacts
from worker import launch
from worker.attempt import Attempt
from worker.broker import is_message
from worker.capabilities import gpus, graders, models, parse_gpus
from worker.drain import DrainFlag
from worker.engine import cap_log
from worker.hearing import Hearing
from worker.tail import Tail
from worker.verdict import verdict_on_exit
from worker.wire import Wire


def test_gpus_are_read_from_the_drivers_own_tool() -> None:
    assert parse_gpus("0, NVIDIA H200, 143771\n1, NVIDIA L4, 23034\n") == [
        {"kind": "cuda", "index": 0, "name": "NVIDIA H200", "memory_bytes": 143771 * 2**20},
        {"kind": "cuda", "index": 1, "name": "NVIDIA L4", "memory_bytes": 23034 * 2**20},
    ]


@pytest.mark.parametrize(("script", "expected"), [("echo '0, Card, 10'", 1), ("exit 9", 0)])
def test_a_tool_without_a_device_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: int) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(gpus()) == expected


def test_local_models_are_the_folders_with_a_config(tmp_path: Path) -> None:
    for name in ("tiny", "org/small"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert models(tmp_path)[-2:] == ["org/small", "tiny"]


def test_every_grader_of_the_contract_is_offered() -> None:
    assert {"string_check", "regex", "math", "multi"} <= set(graders())


def test_memory_is_blamed_only_when_the_kernel_says_so() -> None:
    progress = Progress(last_step=4, resume_checkpoint="resume-000002")
    assert verdict_on_exit(-signal.SIGKILL, progress, was_oom=True).reason == "out_of_memory"
    assert verdict_on_exit(-signal.SIGKILL, progress, was_oom=False).reason == "crash"
    assert verdict_on_exit(-signal.SIGSEGV, progress, was_oom=True).reason == "crash"
    outcome = verdict_on_exit(-64, progress, was_oom=False)
    assert (outcome.last_step, outcome.resume_checkpoint) == (4, "resume-000002")


def test_a_log_keeps_its_tail_and_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"a" * 900 + b"b" * 100)
        assert cap_log(path, limit_bytes=1000, tail_bytes=100) == 0
        writer.write(b"c")
        assert cap_log(path, limit_bytes=1000, tail_bytes=100) == 901
        writer.write(b"more\n")
    assert path.with_name("engine.log.1").read_bytes() == b"b" * 99 + b"c"
    assert path.read_bytes().splitlines()[-1] == b"more"


def test_a_drain_is_heard_in_a_forked_child_and_a_childs_own_is_not_heard_here() -> None:
    flag = DrainFlag()
    child = os.fork()
    if child == 0:
        flag.set_here()
        os._exit(0)
    os.waitpid(child, 0)
    assert not flag.is_set()
    child = os.fork()
    if child == 0:
        flag.set()
        os._exit(0)
    os.waitpid(child, 0)
    assert flag.is_set()


def test_a_process_whose_parent_is_gone_never_starts_its_program(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    program = ["--", sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    answer = subprocess.run([sys.executable, launch.__file__, "--parent", "1", *program], check=False)
    assert answer.returncode == launch.EXIT_PARENT_GONE
    assert not mark.exists()
    subprocess.run([sys.executable, launch.__file__, "--parent", str(os.getpid()), *program], check=True)
    assert mark.exists()


class Queue:
    """The part of Live that hearing and wire use, scripted."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked = 0

    def _next(self) -> Any:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def queued_messages(self, queue: str, limit: int) -> list[str]:
        return list(self._next())

    def get_wanted(self, job_id: str) -> Any:
        return self._next()


def test_deaf_is_idle_with_messages_waiting_for_long_enough() -> None:
    busy = False
    hearing = Hearing(Queue(["m"]), ["q"], 10.0, is_busy=lambda: busy)  # type: ignore[arg-type]
    assert [hearing.look(now) for now in (0.0, 9.0, 10.0)] == [False, False, True]
    busy = True
    assert not hearing.look(20.0)
    busy = False
    assert [hearing.look(now) for now in (21.0, 30.0, 31.0)] == [False, False, True]


@pytest.mark.parametrize("answer", [[], Unavailable("gone")])
def test_an_empty_queue_or_an_absent_redis_is_not_deafness(answer: Any) -> None:
    hearing = Hearing(Queue(answer), ["q"], 10.0, is_busy=lambda: False)  # type: ignore[arg-type]
    assert [hearing.look(now) for now in (0.0, 100.0)] == [False, False]


def test_a_dead_redis_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("worker.wire.time.monotonic", lambda: now)
    queue = Queue(Unavailable("gone"))
    wire = Wire(queue, "ftjob-1", 1, "w")  # type: ignore[arg-type]
    for _ in range(600):
        assert wire.wanted() is None
        now += 0.1
    assert 12 <= queue.asked <= 18


@pytest.mark.parametrize(
    "entry",
    [None, 3, [], {}, {"body": 1, "headers": {}, "properties": {}}, {"body": "", "headers": {}, "properties": {"delivery_tag": "x"}}],
)
def test_what_is_no_message_is_told_from_one(entry: Any) -> None:
    assert not is_message(entry)
    assert is_message({"body": "W10=", "headers": {}, "properties": {"delivery_tag": "1", "delivery_info": {}}})


def test_a_long_backlog_on_a_slow_line_leaves_time_for_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(Artifacts(tmp_path), "ftjob-slow", 1)
    attempt.path.mkdir(parents=True)
    events = (EngineEvent(epoch=1, seq=seq, time=0.0, type="step.completed", message="") for seq in range(1, 11))
    attempt.events_path.write_text("".join(event.to_line() + "\n" for event in events))
    now, sent = 0.0, list[int]()

    class SlowWire(Wire):
        def publish(self, event: EngineEvent) -> bool:
            nonlocal now
            now += 1.0
            sent.append(event.seq)
            return True

    monkeypatch.setattr("worker.tail.time.monotonic", lambda: now)
    tail, wire = Tail(attempt), object.__new__(SlowWire)
    tail.read()
    assert not tail.publish(wire, 3.0)
    assert sent == [1, 2, 3]
    assert tail.publish(wire)
    assert sent == list(range(1, 11))
