"""Commands: numbered instructions that arrive in `commands.jsonl` while the run goes on.

Read at step boundaries only. A number is applied once; what an earlier attempt applied after the checkpoint this one
resumes from is applied again before the same step, so that a replayed stretch repeats the original.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_engine.contract.command import Command
from grpo_engine.events import EVENTS_FILE

COMMANDS_FILE = "commands.jsonl"
Entry = Command | str
"""A command, or why a line is none."""


@dataclass(frozen=True)
class AppliedCommand:
    """A command and the first step it was in force."""

    command: Command
    effective_step: int

    def to_json(self) -> dict[str, Any]:
        """As kept in the resume state."""
        return {"command": self.command.model_dump(), "effective_step": self.effective_step}

    def to_event(self, old: dict[str, float], new: dict[str, float]) -> dict[str, Any]:
        """Data of the `control.applied` event."""
        return {
            "command": self.command.number,
            "type": self.command.type,
            "effective_step": self.effective_step,
            "old": old,
            "new": new,
            "actor": self.command.actor,
            "settings": self.command.model_dump(),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> AppliedCommand:
        """The inverse of `to_json`."""
        return cls(Command.model_validate_json(json.dumps(raw["command"])), int(raw["effective_step"]))


class CommandInbox:
    """New commands, each number once, replays first."""

    def __init__(self, path: Path, told: Callable[[Callable[[], list[Entry]]], list[Entry]] = lambda read: read()) -> None:
        """`told` gives what reading the file gave: over several ranks the first one reads and tells the others."""
        self._path = path
        self._told = told
        self._offset = 0
        self._replays: list[AppliedCommand] = []
        self._refused: set[int] = set()
        self.applied: list[AppliedCommand] = []
        """Commands in force since the start of the run, in the order they were applied."""

    def load(self, applied: list[AppliedCommand], replays: list[AppliedCommand]) -> None:
        """Continue after a resume: `applied` is part of the restored state, `replays` came after it."""
        known = {record.command.number for record in applied}
        self.applied = list(applied)
        self._replays = sorted(
            (record for record in replays if record.command.number not in known),
            key=lambda record: (record.effective_step, record.command.number),
        )

    def due(self, step: int) -> Iterator[Entry]:
        """Commands to apply before `step`: replays whose step has come, then new ones. A string says why a line is unusable."""
        while self._replays and self._replays[0].effective_step <= step:
            yield self._replays.pop(0).command
        waiting = {record.command.number for record in self._replays}
        for entry in self._told(lambda: list(self._new_lines())):
            if isinstance(entry, str) or entry.number not in waiting | self._refused | {record.command.number for record in self.applied}:
                yield entry

    def record(self, command: Command, step: int) -> None:
        """Remember that a command took effect at `step`."""
        self.applied.append(AppliedCommand(command, step))

    def refuse(self, command: Command) -> None:
        """Remember that a command was answered with a refusal."""
        self._refused.add(command.number)

    def _new_lines(self) -> Iterator[Entry]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            if line.strip():
                try:
                    yield Command.model_validate_json(line)
                except ValidationError as error:
                    yield f"unreadable command {line[:200]!r}: {error.errors(include_url=False)[0]['msg']}"


def read_replays(run_dir: Path, resume_from: Path, from_epoch: int, epoch: int, step: int) -> list[AppliedCommand]:
    """`set` commands that attempts between `from_epoch` and `epoch` applied after `step`.

    Attempts are sibling directories named by their epoch; the one that wrote the checkpoint is found from it. A later
    attempt's record of a number replaces an earlier one's.
    """
    files = [resume_from.parent.parent / EVENTS_FILE]
    files += [run_dir.parent / str(number) / EVENTS_FILE for number in range(from_epoch, epoch)]
    found: dict[int, AppliedCommand] = {}
    for path in dict.fromkeys(file.resolve() for file in files):
        if path.is_file() and path.parent != run_dir.resolve():
            for record in _applied_in(path):
                if record.effective_step > step and record.command.type == "set":
                    found[record.command.number] = record
    return list(found.values())


def _applied_in(path: Path) -> Iterator[AppliedCommand]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and b'"control.applied"' in line:
                event = json.loads(line)
                if event["type"] == "control.applied":
                    yield AppliedCommand.from_json(
                        {"command": event["data"]["settings"], "effective_step": event["data"]["effective_step"]}
                    )
