"""A TCP line to Redis that can be cut without a word, and slowed: what a network does that nobody here may configure.

A cut line keeps its connections and carries nothing, in either direction, like a cable that was pulled. Loss shows in TCP as
delay: a part of the pieces is held back, and all behind it.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE = 65_536


class Line:
    """Forwards a local port to another one."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._whole.set()
        self._delay_s, self._loss, self._held_s = 0.0, 0.0, 0.0
        self._dice = random.Random(25)
        self.pieces = 0
        """How many pieces have passed."""
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="line", daemon=True)
        self._thread.start()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing passes meanwhile; what waits passes afterwards."""
        self._loop.call_soon_threadsafe(self._whole.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._whole.set)

    def slow(self, *, delay_s: float, loss: float, held_s: float) -> None:
        """Each piece comes so late; a part of them, by chance, later still."""
        self._delay_s, self._loss, self._held_s = delay_s, loss, held_s

    def close(self) -> None:
        """Drop every connection."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
            try:
                await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, so the other goes too
        finally:
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE):
            await asyncio.sleep(self._delay_s + (self._held_s if self._dice.random() < self._loss else 0.0))
            await self._whole.wait()
            writer.write(piece)
            await writer.drain()
            self.pieces += 1
        with suppress(OSError):
            writer.close()
