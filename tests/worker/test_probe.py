"""A probe on the worker's side: taken once, ended for every reason there is, always answered, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.contract.probe_view import Probe
from jobs.probes import AskerBoard, ProbeAnswer, ProbeOrder, ProbeState, WorkerBoard
from jobs.queue import Publisher
from tests.worker.room import HERE, ROOT, Room, wait_for
from worker.probe import carry_out_probe, close_lost_probe
from worker.probe_place import STRANGE_AGE_S, ProbePlace, probes_dir, sweep_probes
from worker.processes import carriers

COMMAND = (sys.executable, str(HERE / "fake_probe.py"))
SPEC = {
    "model": "tiny", "training_file": "file-x", "method": {"type": "grpo", "grpo": {"grader": {"type": "string_check", "reference": "2"}}},
}  # fmt: skip


class Asker:
    """The API's side, by hand."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.id = f"ftprobe-{secrets.token_hex(16)}"
        self.mark_s = 30.0
        """How long the mark that somebody waits stands; nobody renews it here."""

    def do(self, work: Callable[[AskerBoard], Coroutine[Any, Any, Any]]) -> Any:
        async def go() -> Any:
            board = AskerBoard(replace(self.room.settings, lease_ttl_s=self.mark_s, lost_after_s=2 * self.mark_s))
            try:
                return await work(board)
            finally:
                await board.aclose()

        return asyncio.run(go())

    def post(self, script: str = "answer", limit_s: float = 30.0, **paths: str) -> str:
        (self.room.settings.data_dir / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
        order = ProbeOrder({**SPEC, "metadata": {"script": script}}, {"training_file": "rows.jsonl", **paths}, limit_s)
        self.do(lambda board: board.post(self.id, order))
        return self.id

    def look(self) -> ProbeState:
        state: ProbeState = self.do(lambda board: board.look(self.id))
        return state

    def withdraw(self) -> bool:
        return bool(self.do(lambda board: board.withdraw(self.id)))


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted engine is run as a file and imports from the project."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def asker(room: Room) -> Iterator[Asker]:
    asker = Asker(room)
    yield asker
    assert list(probes_dir(room.artifacts).iterdir()) == [], "no scratch directory is left"
    assert carriers(asker.id, 1) == [], "no process is left"


def carry_out(asker: Asker, **settings: Any) -> ProbeAnswer | None:
    chosen = replace(asker.room.settings, **settings)
    board = WorkerBoard(chosen)
    try:
        return carry_out_probe(asker.id, board, chosen, "worker-1", COMMAND)
    finally:
        board.close()


def test_it_is_tried_and_answered_once(asker: Asker) -> None:
    asker.post("answer helper")
    assert asker.look() == ProbeState(is_waiting=True, is_running=False, answer=None)
    answer = carry_out(asker)
    assert answer is not None
    assert answer.code is None
    assert Probe.model_validate(answer.probe).worker == "worker-1"
    assert asker.look() == ProbeState(is_waiting=False, is_running=False, answer=answer)
    assert carry_out(asker) is None, "the same message again"


def test_a_withdrawn_order_is_nobodys(asker: Asker) -> None:
    asker.post()
    assert asker.withdraw()
    assert carry_out(asker) is None
    assert not asker.withdraw()
    probes_dir(asker.room.artifacts).mkdir(exist_ok=True)


def test_the_time_limit_ends_an_engine_that_will_not_end(asker: Asker) -> None:
    asker.post("hang helper", limit_s=1.5)
    answer = carry_out(asker)
    assert answer is not None
    assert (answer.code, answer.probe) == ("probe_timeout", None)
    assert "after 1.5 s" in answer.message
    assert "GRPO_PROBE_TIMEOUT_S" in answer.message


def test_it_ends_when_nobody_waits(asker: Asker) -> None:
    asker.post("hang")
    leave = threading.Timer(0.5, asker.withdraw)
    leave.start()
    answer = carry_out(asker)
    leave.join()
    assert answer is not None
    assert answer.code == "abandoned"


def test_the_engines_own_refusal_and_its_crash_are_told(asker: Asker) -> None:
    asker.post("refuse")
    refused = carry_out(asker)
    assert refused is not None
    assert (refused.code, refused.param, refused.message) == ("config_error", "model", "no such model")
    asker.post("crash helper")
    crashed = carry_out(asker)
    assert crashed is not None
    assert crashed.code == "crash"
    assert "SIGSEGV" in crashed.message


@pytest.mark.parametrize("path", ["../outside.jsonl", "missing.jsonl"])
def test_files_that_are_not_here_are_named(asker: Asker, path: str) -> None:
    (asker.room.directory / "outside.jsonl").write_text("{}\n")
    asker.post(training_file=path)
    answer = carry_out(asker)
    assert answer is not None
    assert answer.code == "unavailable"


def test_ids_that_are_none_of_ours_touch_nothing(asker: Asker) -> None:
    for name in ("../../etc", "ftprobe-", f"ftprobe-{'G' * 32}"):
        board = WorkerBoard(asker.room.settings)
        assert carry_out_probe(name, board, asker.room.settings, "worker-1", COMMAND) is None
        board.close()
        close_lost_probe(asker.room.settings, name)
    assert not probes_dir(asker.room.artifacts).exists()
    probes_dir(asker.room.artifacts).mkdir()


def test_only_what_the_dead_left_is_swept(asker: Asker) -> None:
    mine, strange, old = (ProbePlace(asker.room.artifacts, f"ftprobe-{letter * 32}") for letter in "abc")
    mine.prepare()
    for place in (strange, old):
        place.path.mkdir()
    os.utime(old.path, times=(0, 0))
    assert STRANGE_AGE_S > 60
    assert sweep_probes(asker.room.artifacts) == [old.probe_id]
    run = mine.path / "run.json"
    run.write_text(run.read_text().replace('"starttime": ', '"starttime": 1'))
    assert sweep_probes(asker.room.artifacts) == [mine.probe_id]
    strange.remove()


@pytest.mark.faults
def test_a_worker_process_runs_it_survives_its_childs_death_and_leaves_nothing(asker: Asker) -> None:
    room, publisher = asker.room, Publisher(asker.room.settings)
    worker = room.worker()
    asker.post("hang helper", limit_s=60.0)
    publisher.ask_probe(asker.id, "grpo-cpu")
    wait_for(lambda: len(carriers(asker.id, 1)) >= 2, "engine and helper")
    assert asker.look().is_running
    os.kill(worker.pool_child().pid, signal.SIGKILL)
    answer = wait_for(lambda: asker.look().answer, "an answer")
    assert answer.code == "worker_lost"
    wait_for(lambda: not carriers(asker.id, 1), "the engine is gone")
    asker.id = f"ftprobe-{secrets.token_hex(16)}"
    asker.post("answer")
    publisher.ask_probe(asker.id, "grpo-cpu")
    assert wait_for(lambda: asker.look().answer, "the next probe's answer").probe is not None
    asker.id = f"ftprobe-{secrets.token_hex(16)}"
    asker.post("hang", limit_s=60.0)
    publisher.ask_probe(asker.id, "grpo-cpu")
    wait_for(lambda: carriers(asker.id, 1), "an engine")
    worker.process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: asker.look().answer, "an answer").code == "drain"
    worker.process.wait(20)
    publisher.close()


def test_the_rows_lie_where_the_order_says(asker: Asker, tmp_path: Path) -> None:
    """A link out of the data directory is followed before it is judged."""
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (asker.room.settings.data_dir / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    asker.post(training_file="link.jsonl")
    answer = carry_out(asker)
    assert answer is not None
    assert (answer.code, "not in the data directory" in answer.message) == ("unavailable", True)
