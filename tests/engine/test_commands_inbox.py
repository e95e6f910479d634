"""Commands arrive in a file, each number acts once, and a replayed stretch meets them at the same step."""

from __future__ import annotations

from pathlib import Path

from grpo_engine.commands import AppliedCommand, CommandInbox, read_replays
from grpo_engine.contract.command import Command
from grpo_engine.events import EventLog


def write(path: Path, *commands: Command) -> None:
    with path.open("a") as file:
        for command in commands:
            file.write(command.model_dump_json() + "\n")


def set_beta(number: int, beta: float = 0.1) -> Command:
    return Command(number=number, type="set", beta=beta)


def test_a_command_is_delivered_once(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    inbox = CommandInbox(path)
    assert list(inbox.due(1)) == []
    write(path, set_beta(1), set_beta(2))
    due = list(inbox.due(2))
    assert [command.number for command in due if isinstance(command, Command)] == [1, 2]
    for command in due:
        assert isinstance(command, Command)
        inbox.record(command, 2)
    write(path, set_beta(1), set_beta(2), set_beta(3))
    assert [command.number for command in inbox.due(3) if isinstance(command, Command)] == [3]


def test_a_refused_command_is_not_delivered_again(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    inbox = CommandInbox(path)
    write(path, set_beta(1))
    (command,) = inbox.due(1)
    assert isinstance(command, Command)
    inbox.refuse(command)
    write(path, set_beta(1))
    assert list(inbox.due(2)) == []


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    inbox = CommandInbox(path)
    line = set_beta(1).model_dump_json() + "\n"
    path.write_text(line[:10])
    assert list(inbox.due(1)) == []
    path.write_text(line)
    assert list(inbox.due(2)) == [set_beta(1)]


def test_an_unreadable_line_is_reported_and_the_next_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    path.write_text('{"number": 1, "type": "explode"}\n')
    write(path, set_beta(2))
    first, second = CommandInbox(path).due(1)
    assert isinstance(first, str)
    assert "explode" in first
    assert second == set_beta(2)


def test_replays_come_at_their_step_and_a_resent_copy_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    inbox = CommandInbox(path)
    inbox.load([AppliedCommand(set_beta(1), 2)], [AppliedCommand(set_beta(2), 5), AppliedCommand(set_beta(1), 2)])
    write(path, set_beta(1), set_beta(2), set_beta(3))
    assert list(inbox.due(4)) == [set_beta(3)]
    assert list(inbox.due(5)) == [set_beta(2)]


def test_what_earlier_attempts_applied_after_the_checkpoint_is_found_in_their_events(tmp_path: Path) -> None:
    for epoch, records in {1: [(1, 3, 0.1), (2, 6, 0.2)], 2: [(2, 6, 0.2), (3, 7, 0.3)], 3: [(4, 8, 0.4)]}.items():
        directory = tmp_path / str(epoch)
        directory.mkdir()
        log = EventLog(directory / "events.jsonl", epoch)
        for number, step, beta in records:
            data = AppliedCommand(set_beta(number, beta), step).to_event({}, {})
            log.emit("control.applied", "applied", step=step, data=data)
        log.emit("control.applied", "paused", step=9, data=AppliedCommand(Command(number=9, type="pause"), 9).to_event({}, {}))
        log.close()
    found = read_replays(tmp_path / "3", tmp_path / "1" / "checkpoints" / "resume-000004", 1, 3, 4)
    assert sorted((record.command.number, record.effective_step) for record in found) == [(2, 6), (3, 7)]
