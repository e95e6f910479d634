"""Templates: `{{item.reference_answer}}`, `{{ item.meta.ids[0] }}`, `{{sample.output_text}}`, `{{sample.output_json.name}}`.

A template is a path and nothing more: no filters, no expressions, no code. Text around the braces stands as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_engine.grader.sample import GraderFault, MissingField, OutputNotJson, View

_PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_STEP = re.compile(r"""\.(?P<key>[\w-]+)|\[(?P<index>-?\d+)\]|\[(?P<quote>["'])(?P<quoted>[^"'\]]+)(?P=quote)\]""")
_MISSING = object()
NOT_ONE = "an object or a list of several texts"
"""What a reference that is one answer cannot be."""


@dataclass(frozen=True)
class Path:
    """One placeholder."""

    root: str
    """`item` or `sample`."""
    steps: tuple[str | int, ...]
    text: str
    """As written, for messages."""


@dataclass(frozen=True)
class Template:
    """Literal text and paths in turn."""

    parts: tuple[str | Path, ...]

    @property
    def item_paths(self) -> list[Path]:
        """Placeholders that read the row."""
        return [part for part in self.parts if isinstance(part, Path) and part.root == "item"]

    def render(self, view: View) -> str:
        """The text for one sample. Raises MissingField for a row without the field, OutputNotJson for a completion without it."""
        return "".join(part if isinstance(part, str) else _text_of(_lookup(part, view)) for part in self.parts)

    def value(self, view: View) -> Any:
        """The value itself where the template is a column alone, else the text. Raises as `render` does."""
        path = self.parts[0] if len(self.parts) == 1 else None
        return _lookup(path, view) if isinstance(path, Path) else self.render(view)

    def render_value(self, view: View) -> str:
        """`render` for a reference that is one answer: where the template is a column alone, a list of one stands for its element.

        Raises GraderFault for an object or a list of several texts, as JSON no answer would equal them.
        """
        path = self.parts[0] if len(self.parts) == 1 else None
        if not isinstance(path, Path):
            return self.render(view)
        value = _lookup(path, view)
        if isinstance(value, list) and len(value) == 1 and value[0] is not None:
            value = value[0]
        if isinstance(value, Mapping) or (isinstance(value, list) and not all(isinstance(one, int | float) for one in value)):
            raise GraderFault("invalid_variable", f"{{{{{path.text}}}}} is {NOT_ONE}; name one of its values in the template")
        return _text_of(value)


def parse_template(text: str) -> Template:
    """Raises ValueError with a sentence for a placeholder that names nothing known."""
    parts: list[str | Path] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        parts += [text[end : match.start()], _parse_path(match.group(1).strip())]
        end = match.end()
    rest = text[end:]
    if "{{" in rest:
        raise ValueError("a '{{' is never closed; close it with '}}'")
    return Template(tuple(part for part in [*parts, rest] if part != ""))


def _parse_path(inside: str) -> Path:
    match = re.match(r"[A-Za-z_]+", inside)
    root = match.group() if match else ""
    if root not in ("item", "sample"):
        raise ValueError(f"unknown variable {{{{{inside}}}}}; use item.<column>, sample.output_text or sample.output_json")
    steps: list[str | int] = []
    position = len(root)
    while position < len(inside):
        step = _STEP.match(inside, position)
        if step is None:
            raise ValueError(f"{{{{{inside}}}}} is not a path; write it like {{{{item.meta.ids[0]}}}}, without filters or expressions")
        if step["index"] is not None:
            steps.append(int(step["index"]))
        else:
            steps.append(step["key"] or step["quoted"])
        position = step.end()
    if root == "sample" and (not steps or steps[0] not in ("output_text", "output_json", "choices") or _goes_below_text(steps)):
        raise ValueError(f"unknown variable {{{{{inside}}}}}; a sample has output_text, output_json and choices[0].message.content")
    return Path(root, tuple(steps), inside)


def _goes_below_text(steps: list[str | int]) -> bool:
    if steps[0] == "choices":
        return steps != ["choices", 0, "message", "content"]
    return steps[0] == "output_text" and len(steps) > 1


def _lookup(path: Path, view: View) -> Any:
    if path.root == "sample":
        if path.steps[0] != "output_json":
            return view.output_text
        value = _walk(view.output_json, path.steps[1:])
        if value is _MISSING:
            raise OutputNotJson(f"the completion's JSON has no {path.text.removeprefix('sample.')}")
        return value
    value = find_in_row(path, view.item)
    if value is None:
        raise MissingField(f"{{{{{path.text}}}}} names nothing in this row (missing or null); its columns are {columns_of(view.item)}")
    return value


def find_in_row(path: Path, item: Mapping[str, Any]) -> Any:
    """The value of an item path, or None when it is missing or null."""
    value = _walk(item, path.steps)
    return None if value is _MISSING else value


def columns_of(item: Mapping[str, Any]) -> str:
    """The row's columns for a message."""
    return ", ".join(repr(name) for name in list(item)[:20]) or "none"


def _walk(value: Any, steps: Sequence[str | int]) -> Any:
    for step in steps:
        if isinstance(value, Mapping) and str(step) in value:
            value = value[str(step)]
        elif isinstance(value, list) and (isinstance(step, int) or step.isdecimal()) and -len(value) <= int(step) < len(value):
            value = value[int(step)]
        else:
            return _MISSING
    return value


def _text_of(value: Any) -> str:
    """Text as it is, 42.0 as 42, true as true, the rest as compact JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
