"""Reading a job's event stream, for many readers on one event loop, and what both sides of Redis share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from grpo_engine.contract.error import Unavailable
from jobs import keys
from jobs.settings import Settings


class StreamEntry(NamedTuple):
    """One event of a job's stream."""

    id: str
    """`<epoch>-<seq>`."""
    event: str
    """The event's JSON line."""


@contextmanager
def answers() -> Iterator[None]:
    """Turn whatever keeps Redis from answering into Unavailable."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise Unavailable(f"Redis does not answer: {type(error).__name__}: {error}", headers={"Retry-After": "5"}) from error


class AsyncLive:
    """The asynchronous side, for server-sent events. Same promises."""

    def __init__(self, client: redis.asyncio.Redis, settings: Settings) -> None:
        self._redis = client
        self._settings = settings

    @classmethod
    def connect(cls, settings: Settings) -> AsyncLive:
        """A client with its own pool; connects on first use. One per event loop."""
        client = redis.asyncio.Redis.from_url(settings.redis_url, retry=Retry(NoBackoff(), 0), **client_options(settings))
        return cls(client, settings)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    async def ping(self) -> None:
        """Raises Unavailable unless Redis accepts writes."""
        async with _answers_async():
            await self._redis.set(keys.PING, "1", ex=keys.DAY_S)

    async def read_stream(self, job_id: str, after_id: str = "0-0", block_ms: int = 0, count: int = 1000) -> list[StreamEntry]:
        """Entries after an id, oldest first; waits up to `block_ms` (at most half of redis_timeout_s) for the first."""
        key = keys.events(job_id)
        block = min(block_ms, int(self._settings.redis_timeout_s * 500)) or None
        async with _answers_async():
            answer = await self._redis.xread({key: after_id}, count=count, block=block)
        return dict(entries_of(answer)).get(key, [])

    async def stream_floor(self, job_id: str) -> str | None:
        """Id of the oldest entry the stream still holds; None when it holds none."""
        async with _answers_async():
            oldest = cast(list[tuple[str, Any]], await self._redis.xrange(keys.events(job_id), count=1))
        return oldest[0][0] if oldest else None


@asynccontextmanager
async def _answers_async() -> AsyncIterator[None]:
    with answers():
        yield


def entries_of(answer: Any) -> Iterator[tuple[str, list[StreamEntry]]]:
    """XREAD answers a list of pairs under RESP2 and a mapping under RESP3."""
    pairs = answer.items() if isinstance(answer, dict) else (answer or [])
    for key, batches in pairs:
        rows = batches[0] if isinstance(answer, dict) and batches and isinstance(batches[0], list) else batches
        yield str(key), [StreamEntry(str(entry_id), str(fields["event"])) for entry_id, fields in rows]


def client_options(settings: Settings) -> dict[str, Any]:
    """What every client of ours is made with: text, bounded waits, no retries of its own."""
    options: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": "replace",
        "socket_timeout": settings.redis_timeout_s,
        "socket_connect_timeout": settings.redis_connect_timeout_s,
    }
    return options if settings.redis_url.startswith("unix://") else {**options, "socket_keepalive": True}
