r"""Finding `\boxed{...}` with its braces balanced."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_WORD = re.compile(r"[^\s${}\\]+")


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` (or `\fbox{...}`, or `\boxed 7`) holds; None without one. Linear time."""
    starts = [match.end() for match in _BOX.finditer(text)]
    closings = matching_braces(text) if starts else {}
    for start in reversed(starts):
        if text[start : start + 1] != "{":
            word = _WORD.match(text, start)
            if word:
                return word.group().rstrip(".,;")
        elif start in closings:
            return text[start + 1 : closings[start]]
    return None


def has_box(text: str) -> bool:
    """Whether a box is opened, closed or not."""
    return _BOX.search(text) is not None


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; None when it is never closed."""
    return matching_braces(text).get(start)


def matching_braces(text: str) -> dict[int, int]:
    """Index of each opening brace that is closed, and of its closing brace. Escaped braces do not count."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "{":
            opened.append(index)
        elif character == "}" and opened:
            pairs[opened.pop()] = index
        index += 1
    return pairs
