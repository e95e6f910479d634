"""Events are numbered without gaps, whole lines only, and a full disk never ends training."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from grpo_engine.contract.event import EngineEvent, Outcome
from grpo_engine.events import EventLog
from grpo_engine.outcome import exit_code, write_outcome


def lines(path: Path) -> list[EngineEvent]:
    text = path.read_text()
    assert text.endswith("\n")
    return [EngineEvent.model_validate_json(line) for line in text.splitlines()]


def test_each_event_is_on_disk_when_emit_returns(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 3)
    for number in range(1, 4):
        log.emit("step.completed", f"step {number}", step=number, data={"metrics": {"reward/mean": float("nan")}})
        assert [event.seq for event in lines(log.path)] == list(range(1, number + 1))
    assert lines(log.path)[0].stream_id == "3-1"
    assert json.loads(log.path.read_text().splitlines()[0])["data"]["metrics"]["reward/mean"] == {"value": None, "nonfinite": "nan"}
    log.close()


def test_a_second_attempt_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 1)
    log.emit("engine.started", "up")
    log.close()
    with pytest.raises(FileExistsError, match="directory of its own"):
        EventLog(tmp_path / "events.jsonl", 2)


class FullDisk:
    """os.write as a disk with a number of free bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        self._write = os.write
        monkeypatch.setattr("grpo_engine.events.os.write", self)

    def __call__(self, fd: int, block: bytes) -> int:
        if self.free == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = bytes(block[: self.free])
        self.free -= len(part)
        return self._write(fd, part)


def test_a_full_disk_keeps_events_in_order_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl", 1)
    disk = FullDisk(monkeypatch, free=30)
    for number in range(5):
        log.emit("step.completed", f"step {number}", step=number)
    assert log.num_write_failures > 0
    assert log.path.stat().st_size == 30
    disk.free = 10**6
    log.emit("step.completed", "step 5", step=5)
    assert [(event.seq, event.step) for event in lines(log.path)] == [(n + 1, n) for n in range(6)]
    assert log.num_dropped == 0
    log.close()


def test_events_beyond_the_backlog_are_counted_and_leave_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl", 1, backlog_bytes=400)
    disk = FullDisk(monkeypatch, free=0)
    for number in range(10):
        log.emit("step.completed", "x" * 20, step=number)
    assert log.num_dropped > 0
    disk.free = 10**6
    log.emit("step.completed", "late", step=99)
    events = lines(log.path)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len(events) + log.num_dropped == 11
    log.close()


def test_sync_says_whether_every_event_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl", 1)
    log.emit("step.completed", "step 1", step=1)
    assert log.sync()
    disk = FullDisk(monkeypatch, free=0)
    log.emit("step.completed", "step 2", step=2)
    assert not log.sync(), "an event that waits in memory is not on the disk"
    disk.free = 10**6
    assert log.sync()
    assert [event.step for event in lines(log.path)] == [1, 2]
    log.close()


def test_after_a_failed_fsync_the_events_it_was_for_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second fsync that succeeds proves nothing about pages the first has lost."""
    log = EventLog(tmp_path / "events.jsonl", 1)
    log.emit("step.completed", "step 1", step=1)
    assert log.sync()
    durable = log.path.stat().st_size
    log.emit("step.completed", "step 2", step=2)

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("grpo_engine.events.os.fsync", refuse)
        assert not log.sync()
    written: list[tuple[int, bytes]] = []
    real = os.pwrite

    def pwrite(fd: int, block: bytes, offset: int) -> int:
        written.append((offset, block))
        return real(fd, block, offset)

    monkeypatch.setattr("grpo_engine.events.os.pwrite", pwrite)
    log.emit("step.completed", "step 3", step=3)
    whole = log.path.read_bytes()
    assert log.sync()
    assert written == [(durable, whole[durable:])]
    assert log.path.read_bytes() == whole
    assert log.num_write_failures == 1
    assert log.sync()
    assert len(written) == 1, "once is enough"
    log.close()


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        ("succeeded", "completed", 0),
        ("stopped", "pause", 85),
        ("failed", "config_error", 86),
        ("failed", "nonfinite", 87),
        ("failed", "crash", 1),
    ],
)
def test_the_verdict_is_written_whole_and_has_its_exit_code(tmp_path: Path, status: str, reason: str, code: int) -> None:
    outcome = Outcome.model_validate_json(
        json.dumps({"status": status, "reason": reason, "message": "m", "retryable": False, "last_step": 3})
    )
    write_outcome(tmp_path, outcome)
    assert Outcome.model_validate_json((tmp_path / "outcome.json").read_bytes()) == outcome
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    assert exit_code(outcome) == code


def test_a_file_that_was_removed_or_replaced_is_noticed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 1)
    log.emit("engine.started", "up")
    assert not log.is_gone
    log.path.unlink()
    assert log.is_gone
    log.path.write_text("another")
    assert log.is_gone
    log.close()
