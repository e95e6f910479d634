"""Headers that choose, as RFC 9110 has them: If-Match and If-None-Match (section 13.1), Accept (section 12.5.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TAG = re.compile(r'(?:W/)?"[^"]*"')
_WEIGHT = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")


def names_etag(header: str, etag: str, *, is_strong: bool = False) -> bool:
    """Whether the header is `*` or lists `etag` (a strong tag). A proxy that compresses marks tags as weak: `W/"..."` still names
    the same thing for If-None-Match, and none for If-Match (`is_strong`)."""
    if header.strip() == "*":
        return True
    return any((tag if is_strong else tag.removeprefix("W/")) == etag for tag in _TAG.findall(header))


def preferred(accept: str, offered: Sequence[str]) -> str:
    """The media type of `offered` that an Accept header likes best; of equals the one it names most precisely, then the first. The
    first also when it likes none: an answer that was not asked for says more than a refusal."""
    return max(offered, key=lambda media_type: _liking(accept.lower(), media_type))


def _liking(accept: str, media_type: str) -> tuple[float, int]:
    """Weight and precision of the most precise range that holds the type; a range without a proper weight is none."""
    ranges = ("*/*", media_type.partition("/")[0] + "/*", media_type)
    weight, precision = 0.0, -1
    for part in accept.split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        given = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        if name in ranges and ranges.index(name) > precision and _WEIGHT.fullmatch(given):
            weight, precision = float(given), ranges.index(name)
    return weight, precision if weight else -1
