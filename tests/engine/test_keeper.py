"""Which resume states a run deletes, and what must be on the disk before it does."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.__main__ import read_dispatch
from grpo_engine.assemble import assemble
from grpo_engine.contract.event import EngineEvent
from grpo_engine.events import EventLog
from grpo_engine.keeper import Keeper
from grpo_engine.train import train
from tests.engine.runs import make_job, make_run, make_spec


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def states_after_each_step(job: Path, name: str, before: Callable[[EventLog], None]) -> list[list[int]]:
    """Run four steps, renewing the resume state in each; the steps of the states kept. `before` is called when all is ready."""
    run_dir = make_run(job, name, make_spec(job, checkpoints={"resume_every": 1}))
    log = EventLog(run_dir / "events.jsonl", 1)
    kept = []
    with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log) as learner:
        before(log)
        for _ in itertools.islice(train(learner, Keeper(run_dir, learner, log), log), 4):
            kept.append(sorted(int(path.name.removeprefix("resume-")) for path in (run_dir / "checkpoints").iterdir()))
    log.close()
    return kept


def test_a_state_goes_only_when_the_words_about_the_steps_after_it_are_on_the_disk(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves of events.jsonl is what the last fsync has seen of it; each deletion is held against that."""
    on_disk = b""
    deleted: list[tuple[str, list[int], list[int]]] = []
    fsync, rmtree = os.fsync, shutil.rmtree

    def watch(log: EventLog) -> None:
        def seen(fd: int) -> None:
            nonlocal on_disk
            fsync(fd)
            if os.path.samestat(os.fstat(fd), log.path.stat()):
                on_disk = log.path.read_bytes()

        def delete(path: Path, **options: Any) -> None:
            durable = [EngineEvent.model_validate_json(line) for line in on_disk.splitlines()]
            done = [event.step or 0 for event in durable if event.type == "step.completed"]
            announced = [event.step or 0 for event in durable if event.type == "checkpoint.saved"]
            deleted.append((path.name, done, announced))
            rmtree(path, **options)

        monkeypatch.setattr("grpo_engine.events.os.fsync", seen)
        monkeypatch.setattr("grpo_engine.keeper.shutil.rmtree", delete)

    assert states_after_each_step(job, "order", watch) == [[1], [2], [3], [4]]
    assert deleted == [
        ("resume-000001", [1, 2], [1, 2]),
        ("resume-000002", [1, 2, 3], [1, 2, 3]),
        ("resume-000003", [1, 2, 3, 4], [1, 2, 3, 4]),
    ]


def test_a_disk_that_takes_no_events_keeps_the_state_that_can_do_them_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deleted while fsync fails; as soon as it works, what has become old goes at once."""
    fsync = os.fsync
    failures = 2

    def watch(log: EventLog) -> None:
        def refuse(fd: int) -> None:
            nonlocal failures
            if failures and os.path.samestat(os.fstat(fd), log.path.stat()):
                failures -= 1
                raise OSError(errno.EIO, "Input/output error")
            fsync(fd)

        monkeypatch.setattr("grpo_engine.events.os.fsync", refuse)

    assert states_after_each_step(job, "refused", watch) == [[1], [1, 2], [1, 2, 3], [4]]


def test_an_attempt_that_was_given_up_deletes_nothing(job: Path) -> None:
    """Its worker was taken for dead; the next attempt may be reading any state that lies here."""

    def give_up(log: EventLog) -> None:
        log.path.with_name("outcome.json").write_text("{}")

    assert states_after_each_step(job, "given-up", give_up) == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
