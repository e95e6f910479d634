r"""Finding `\boxed{...}` with its braces balanced."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` (or `\fbox{...}`, or `\boxed 7`) holds; None without one."""
    for match in reversed(list(_BOX.finditer(text))):
        inside = _box_at(text, match.end())
        if inside is not None:
            return inside
    return None


def has_box(text: str) -> bool:
    """Whether a box is opened, closed or not."""
    return _BOX.search(text) is not None


def _box_at(text: str, start: int) -> str | None:
    if text[start : start + 1] != "{":
        word = re.match(r"[^\s${}\\]+", text[start:])
        return word.group().rstrip(".,;") if word else None
    end = closing_brace(text, start)
    return None if end is None else text[start + 1 : end]


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; escaped braces do not count. None when it is never closed."""
    depth, index = 0, start
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 2
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return None
