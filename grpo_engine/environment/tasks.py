"""Tasks of reasoning-gym, inside a grader process: rows of one, and its scorer. The only module that loads the package.

A completion that makes a scorer raise scores 0 when the scorer can judge the row's own answer: then it is the completion that
cannot be read. Otherwise it is a fault.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

from grpo_engine.contract.environment import Environment
from grpo_engine.environment.guard import guarded
from grpo_engine.grader.compiled import check_value
from grpo_engine.grader.mathematics.extract import after_reasoning, last_tag
from grpo_engine.grader.sample import GraderFault, Score, View

LEFT_OUT = {
    "composite": "its members would need settings of their own; choose one of them",
    "codeio": "it executes the programs of its rows; choose another task",
    "game_of_life_halting": "its scorer takes any answer for right; choose another task",
}
"""Tasks that are refused, and why."""
_NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)(?![a-z])", re.IGNORECASE)
"""Python reads these as numbers, and scorers that compare distances then find any answer right (complex_arithmetic)."""
_CHECKED_ROWS = 8
_MAX_METADATA_CHARACTERS = 200_000


class Problem(Exception):
    """Why an environment cannot be used: the field below `environment`, and a sentence with the remedy."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def rows_of(environment: Environment) -> list[dict[str, Any]]:
    """The rows: `messages` with the question, and `question`, `answer`, `metadata` as the task made them. Raises Problem."""
    task = _task(environment, environment.size)
    random.seed(environment.seed)
    rows = []
    for index in range(environment.size):
        try:
            entry = task[index]
            row = _row(entry)
            if index < _CHECKED_ROWS:
                _require_same_score(task, entry, row)
        except Problem:
            raise
        except Exception as error:
            words = f"the task {environment.name!r} cannot make row {index + 1} with these settings: {_said(error)}; change them"
            raise Problem("config", words) from error
        rows.append(row)
    return rows


def compile_environment(environment: Environment) -> Callable[[View], Score]:
    """The task's scorer as a function that never raises. Raises GraderFault when the task cannot be set up here."""
    try:
        task = _task(environment, 1)
    except Problem as problem:
        raise GraderFault("raised", str(problem)) from problem

    def score(view: View) -> Score:
        answer = _answer(view.output_text, environment.answer)
        if answer is not None and _NO_NUMBER.search(answer) and not _NO_NUMBER.search(str(view.item.get("answer"))):
            return Score(0.0, detail={"answer": answer, "fault": "it is no number, and compares as if it were any"})
        try:
            return Score(check_value(_score(task, answer, view.item)), detail={"answer": answer})
        except GraderFault as fault:
            return Score(float("nan"), error=str(fault), kind=fault.kind)
        except Exception as error:  # noqa: BLE001 - whatever a scorer raises is the completion's failing or its own fault
            return _unread(task, view, f"{environment.name}: {_said(error)}", answer)

    return score


def _unread(task: Any, view: View, problem: str, answer: str | None) -> Score:
    """The score of a completion on which the scorer raised."""
    try:
        check_value(_score(task, view.item["answer"], view.item))
    except Exception:  # noqa: BLE001 - the scorer raises on the row itself, so it is to blame
        return Score(float("nan"), error=problem, kind="raised")
    return Score(0.0, detail={"answer": answer, "fault": problem})


def _task(environment: Environment, size: int) -> Any:
    """The task's dataset. Raises Problem."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym.factory as factory  # registers the tasks through its package

    if environment.name in LEFT_OUT:
        raise Problem("name", f"the task {environment.name!r} is left out: {LEFT_OUT[environment.name]}")
    tasks = {name: pair for name, pair in factory.DATASETS.items() if name not in LEFT_OUT}
    if environment.name not in tasks:
        raise Problem("name", _unknown("task", environment.name, sorted(tasks), "environment.name"))
    make, config = tasks[environment.name]
    fields = {field.name: field for field in dataclasses.fields(config) if field.init and field.name not in ("seed", "size")}
    settings = {name: _setting(name, value, fields) for name, value in environment.config.items()}
    try:
        filled = config(**settings, seed=environment.seed, size=size)
        if hasattr(filled, "validate"):
            filled.validate()
        return make(config=filled)
    except Exception as error:
        raise Problem("config", f"the task {environment.name!r} refuses these settings: {_said(error)}; correct them") from error


def _setting(name: str, value: Any, fields: dict[str, dataclasses.Field[Any]]) -> Any:
    """A setting in the type of its default. Raises Problem."""
    if name not in fields:
        raise Problem(f"config.{name}", _unknown("setting", name, sorted(fields), f"environment.config.{name}"))
    default = fields[name].default
    if default is dataclasses.MISSING or default is None:
        return value
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default) and value is not None:
        words = f"environment.config.{name} is {json.dumps(value)}; give a value of type {type(default).__name__}, such as {default!r}"
        raise Problem(f"config.{name}", words)
    return value


def _unknown(what: str, name: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{where}: there is no {what} {name!r}; {hint}there are: {', '.join(known) or 'none'}"


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    question, answer = str(entry["question"]), entry["answer"]
    row = {
        "messages": [{"role": "user", "content": question}],
        "question": question,
        "answer": answer if answer is None else str(answer),
        "metadata": entry.get("metadata", {}),
    }
    text = json.dumps(row, default=_as_json)
    if len(text) > _MAX_METADATA_CHARACTERS:
        raise ValueError(f"the row takes {len(text):,} characters")
    found: dict[str, Any] = json.loads(text)
    return found


def _require_same_score(task: Any, entry: dict[str, Any], row: dict[str, Any]) -> None:
    """Raise Problem when the task's scorer does not find in a row, which is JSON, what it finds in its own entry."""
    before = _score(task, entry["answer"], entry)
    try:
        after = _score(task, row["answer"], row)
    except Exception as error:
        raise Problem("name", f"the rows of this task cannot be kept as JSON ({_said(error)}); choose another task") from error
    if before != after:
        raise Problem("name", "the rows of this task cannot be kept as JSON: its scorer judges them otherwise; choose another task")


def _score(task: Any, answer: str | None, entry: Any) -> Any:
    """A scorer may return any real number of Python's or NumPy's."""
    with guarded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = task.score_answer(answer, entry={**entry})
    return float(value) if isinstance(value, bool) or type(value).__module__ == "numpy" else value


def _answer(text: str, how: str) -> str | None:
    """What is handed to the scorer; None = no answer, as reasoning-gym says it."""
    visible = after_reasoning(text)
    if how != "whole":
        tagged = last_tag(visible, "answer")
        if tagged is not None or how == "tag":
            return tagged.strip() or None if tagged is not None else None
    return visible.strip() or None


def _as_json(value: Any) -> Any:
    """NumPy's numbers and arrays, sets and dates in JSON's types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500] if str(error) else type(error).__name__
