"""One reading of a job's Redis stream for all who stand at the same place in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import CancelScope

from jobs.live import AsyncLive, StreamEntry
from jobs.settings import Settings

_BLOCK_MS = 1000


class Tails:
    """Belongs to one event loop. The Redis client lives while somebody reads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._live: AsyncLive | None = None
        self._num_readers = 0
        self._readings: dict[tuple[str, str], asyncio.Task[list[StreamEntry]]] = {}

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[None]:
        """For as long as a stream may ask; with the last one the connections to Redis go."""
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers and self._live is not None:
                live, self._live = self._live, None
                left = list(self._readings.values())
                self._readings.clear()
                with CancelScope(shield=True):
                    for reading in left:
                        reading.cancel()
                    await asyncio.gather(*left, return_exceptions=True)
                    await live.aclose()

    async def after(self, job_id: str, place: str) -> list[StreamEntry]:
        """Entries of the job that follow a place, oldest first; waits up to a second for one. Raises Unavailable."""
        key = (job_id, place)
        reading = self._readings.get(key)
        if reading is None:
            if self._live is None:
                self._live = AsyncLive.connect(self._settings)
            reading = asyncio.create_task(self._live.read_stream(job_id, place, block_ms=_BLOCK_MS))
            self._readings[key] = reading
            reading.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(reading)  # one reader that leaves takes it from nobody

    def _forget(self, key: tuple[str, str], done: asyncio.Task[list[StreamEntry]]) -> None:
        if self._readings.get(key) is done:
            del self._readings[key]
        if not done.cancelled():
            done.exception()  # seen here, as its readers may all have left
