"""If-Match and If-None-Match: lists of entity tags, as RFC 9110 section 13.1 has them."""

from __future__ import annotations

import re

_TAG = re.compile(r'(?:W/)?"[^"]*"')


def names_etag(header: str, etag: str, *, is_strong: bool = False) -> bool:
    """Whether the header is `*` or lists `etag` (a strong tag). A proxy that compresses marks tags as weak: `W/"..."` still names
    the same thing for If-None-Match, and none for If-Match (`is_strong`)."""
    if header.strip() == "*":
        return True
    return any((tag if is_strong else tag.removeprefix("W/")) == etag for tag in _TAG.findall(header))
