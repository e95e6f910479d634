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


END = ServerEvent(None, "end", None)
"""What a reader answers at the proper end of a stream."""


class Reader:
    """Puts events together from lines."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._kind = "message"
        self._data: list[str] = []

    def feed(self, line: str) -> ServerEvent | None:
        """The event this line completes, `END`, or None."""
        if not line:
            text, kind = "\n".join(self._data), self._kind
            has_data = bool(self._data)
            self._reset()
            if not has_data:
                return None
            return END if text == DONE else ServerEvent(self._id, kind, json.loads(text))
        if line.startswith(":"):
            return None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self._id = value
        elif name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        return None

    def _reset(self) -> None:
        self._kind = "message"
        self._data = []


def parse(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Events of a stream, `END` last when it ended properly."""
    reader = Reader()
    for line in lines:
        event = reader.feed(line)
        if event is not None:
            yield event
        if event is END:
            return
