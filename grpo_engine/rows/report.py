"""What reading a training file found: the rows, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_engine.contract.error import InvalidRequest

MAX_LISTED = 100
"""Problems and duplicates kept with their text; all are counted."""

TRAINING_FILE = "training_file"


class BadData(InvalidRequest):
    """The file, or a line of it, cannot be used. The message names the line and the remedy."""

    code = "invalid_data"


@dataclass(frozen=True)
class Row:
    """One usable row. Exactly one of `messages` and `text` is set."""

    line: int
    """Line of the file, from 1 (JSONL, CSV); row number for Parquet."""
    messages: list[dict[str, str]] | None
    """Role and content of each message, to be rendered with the chat template."""
    text: str | None
    """A prompt that is fed as it stands."""
    item: dict[str, Any]
    """Every column, as graders see it, with `reference_answer` filled in where the format or the mapping gives one."""


@dataclass(frozen=True)
class RowProblem:
    """Why one row cannot be used."""

    line: int
    field: str | None
    message: str
    """What is wrong and what to do, without the line number."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


@dataclass
class RowReport:
    """The outcome of reading one file."""

    rows: list[Row] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    """The first of the rows left out."""
    num_bad: int = 0
    num_read: int = 0
    """Records in the file, blank lines apart."""
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    """(line, line of the first row with the same prompt); such rows are kept."""
    num_duplicates: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    """Rows by the format they were read as."""
    columns: dict[str, int] = field(default_factory=dict)
    """Rows by column that they have."""

    def add_problem(self, problem: RowProblem) -> None:
        """Count a bad row and keep its text while there is room."""
        self.num_bad += 1
        if len(self.problems) < MAX_LISTED:
            self.problems.append(problem)

    def to_json(self) -> dict[str, Any]:
        """Counts and the first problems and duplicates, for events and API replies."""
        return {
            "num_read": self.num_read,
            "num_rows": len(self.rows),
            "num_bad": self.num_bad,
            "problems": [{"line": p.line, "field": p.field, "message": p.message} for p in self.problems],
            "num_duplicates": self.num_duplicates,
            "duplicates": [{"line": line, "first_line": first} for line, first in self.duplicates],
            "formats": self.formats,
            "columns": self.columns,
        }


def refusal(problems: Iterable[RowProblem], count: int) -> BadData:
    """The error for a file with bad rows: the first problem in full, then the other lines."""
    first, *others = problems
    message = str(first)
    if others:
        lines = ", ".join(str(problem.line) for problem in others[:10])
        hidden = count - 1 - min(len(others), 10)
        message += f" ({count - 1} more bad line{'s' if count > 2 else ''}: {lines}{f' and {hidden} others' if hidden else ''})"
    return BadData(message, param=TRAINING_FILE)
