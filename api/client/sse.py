"""Server-sent events as a client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"
"""Data of the frame after which nothing follows."""


@dataclass(frozen=True)
class ServerEvent:
    """One event of a stream."""

    id: str | None
    """Where to go on after it."""
    type: str
    data: Any
    """Decoded JSON."""


def parse(lines: Iterable[str]) -> Iterator[ServerEvent | None]:
    """Events of a stream; None stands for its proper end."""
    event_id: str | None = None
    kind = "message"
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                text = "\n".join(data)
                if text == DONE:
                    yield None
                    return
                yield ServerEvent(event_id, kind, json.loads(text))
            kind, data = "message", []
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                event_id = value
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
