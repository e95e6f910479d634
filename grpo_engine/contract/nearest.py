"""Which known name a misspelt one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALIKE = 0.75
"""Share of characters two names must have in common, in order; below it a suggestion is more often wrong than right."""


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str | None:
    """The known name most like this one; None when none is alike. A `prefix` that all of them share is no likeness."""
    bare = {other.removeprefix(prefix): other for other in known}
    found = difflib.get_close_matches(name.removeprefix(prefix), bare, n=1, cutoff=_ALIKE)
    return bare[found[0]] if found else None
