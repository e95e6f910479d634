"""Server-sent events on the wire: frames, heartbeats, a bound on frozen readers, and an end that always releases its parts.

A heartbeat is the comment line `: hb` without a blank line after it: a blank line would dispatch an event whose only content is
the remembered id, which the openai SDK's reader cannot parse.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from anyio import CancelScope
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from grpo_engine.contract.error import RateLimited

logger = logging.getLogger("grpo.api")

HEARTBEAT = b": hb\n"
DEGRADED = b": degraded\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class StreamLimits:
    """Times in seconds."""

    heartbeat_s: float = 15.0
    poll_s: float = 0.5
    """Between two looks at the database while nothing is pushed."""
    send_timeout_s: float = 30.0
    """A reader that takes nothing for this long is dropped."""
    retry_redis_s: float = 5.0
    max_streams: int = 200
    max_per_key: int = 8
    """Streams one API key may hold; without keys only `max_streams` counts."""


class StreamSlots:
    """Counts open streams of this process."""

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self._open: Counter[str | None] = Counter()

    @property
    def open(self) -> int:
        """Streams open now."""
        return self._open.total()

    def take(self, key_id: str | None) -> None:
        """Count a stream of this key. Raises RateLimited (429) when every slot is taken."""
        limit, held, whose = self.limits.max_streams, self.open, "this server serves"
        if key_id is not None and self._open[key_id] >= self.limits.max_per_key:
            limit, held, whose = self.limits.max_per_key, self._open[key_id], "one key may hold"
        if held >= limit:
            raise RateLimited(f"{held} streams are open, the most {whose}; close one", headers={"retry-after": "15"})
        self._open[key_id] += 1

    def give_back(self, key_id: str | None) -> None:
        """The stream has ended."""
        self._open[key_id] -= 1


def frame(data: Any, *, event: str, event_id: str | None) -> bytes:
    """One event. `data` must be strict JSON (see `encode_nonfinite`); `event` and `event_id` hold no line break. The JSON is ASCII:
    readers that split text as Unicode does (httpx is one) would break a line at U+2028 or U+0085 in it."""
    lines = [f"id: {event_id}"] if event_id is not None else []
    lines += [f"event: {event}", f"data: {json.dumps(data, allow_nan=False, separators=(',', ':'))}"]
    return ("\n".join(lines) + "\n\n").encode()


class EventStream(StreamingResponse):
    """Sends a generator of frames; closes it when the client leaves, freezes, or the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], slots: StreamSlots, key_id: str | None) -> None:
        super().__init__(frames, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._frames = frames
        self._slots = slots
        self._key_id = key_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RateLimited before anything is sent."""
        self._slots.take(self._key_id)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slots.give_back(self._key_id)
            with CancelScope(shield=True):
                await self._frames.aclose()

    async def stream_response(self, send: Send) -> None:
        """Starlette's hook: runs until done, or is cancelled when the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._frames:
            if not await self._sent_in_time(send, chunk):
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _sent_in_time(self, send: Send, chunk: bytes) -> bool:
        timeout = self._slots.limits.send_timeout_s
        try:
            async with asyncio.timeout(timeout):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            logger.info("dropped a stream whose reader took nothing for %s s", timeout)
            return False
        return True
