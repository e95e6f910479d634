"""JSON Lines: one object a line, strictly. What people upload instead is recognised and named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from grpo_engine.rows.report import TRAINING_FILE, BadData, RowProblem

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_DIGITS = 4000
"""Python refuses to read or write longer integers as text."""
_BOM = b"\xef\xbb\xbf"
_LONE_CR = re.compile(rb"\r(?!\n|\Z)")
"""A line end of its own; JSON strings cannot hold it."""


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]] | RowProblem]:
    """(line number, object) of each line that is not blank, or its problem.

    Raises BadData when the first record shows that the file is not JSON Lines at all.
    """
    is_first = True
    with path.open("rb") as stream:
        for number, raw in enumerate(_lines(stream), start=1):
            line = raw
            while line.startswith(_BOM):  # files joined with `cat` have one in the middle
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            record = decode_line(number, line)
            if is_first:
                is_first = False
                if isinstance(record, RowProblem):
                    _refuse_other_shapes(path, line)
            yield record


def _lines(stream: Any) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise BadData(f"a line is longer than {MAX_LINE_BYTES // 2**20} MiB; one JSON object per line is expected", param=TRAINING_FILE)
        yield from _LONE_CR.split(line)


def decode_line(number: int, line: bytes) -> tuple[int, dict[str, Any]] | RowProblem:
    """One line as (number, object), or what is wrong with it."""
    try:
        value = json.loads(
            line.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_no_duplicates
        )
    except UnicodeDecodeError as error:
        return RowProblem(number, None, f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")
    except RecursionError:
        return RowProblem(number, None, "the JSON is nested too deeply; flatten it")
    except json.JSONDecodeError as error:
        return RowProblem(number, None, f"not valid JSON: {error.msg} at column {error.colno}; write one JSON object on this line")
    except ValueError as error:
        return RowProblem(number, None, f"not strict JSON: {error}; correct it")
    if isinstance(value, dict):
        return number, value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return RowProblem(number, None, "the line is quoted JSON (a string that holds an object); write the object itself")
    return RowProblem(number, None, f"the line holds {_name_of(value)}; write one JSON object per line")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too long")
    return int(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return record


def _name_of(value: Any) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a JSON array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names[type(value)]


def _refuse_other_shapes(path: Path, first_line: bytes) -> None:
    """Raise BadData when the whole file is an array or one pretty-printed object rather than lines with a fault."""
    start = first_line.lstrip()[:1]
    if start == b"[":
        raise BadData("the file looks like a JSON array; write one JSON object per line, without brackets and commas", param=TRAINING_FILE)
    if start == b"{" and (first_line.strip() == b"{" or _is_one_object(path)):
        raise BadData(
            "the file looks like pretty-printed JSON; write each object on one line (for example with `jq -c .`)", param=TRAINING_FILE
        )


def _is_one_object(path: Path) -> bool:
    """Whether the first bytes go on as one object over several lines."""
    with path.open("rb") as stream:
        text = stream.read(1_000_000).removeprefix(_BOM).decode("utf-8", errors="replace").lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]
