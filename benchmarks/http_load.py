"""A light load generator: HTTP/1.1 keep-alive over plain sockets, the same for every server, and readers of event streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Target = Callable[[int], bytes]
"""From the number of a request to its bytes."""


@dataclass
class Timings:
    """Seconds of each request, and how long all took."""

    seconds: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    num_errors: int = 0
    num_bytes: int = 0

    def summary(self) -> dict[str, Any]:
        """In milliseconds."""
        if not self.seconds:
            return {"requests": 0, "errors": self.num_errors}
        ordered = sorted(self.seconds)
        return {
            "requests": len(ordered),
            "errors": self.num_errors,
            "per_s": round(len(ordered) / self.wall_s, 1),
            "bytes_each": self.num_bytes // len(ordered),
            **{f"p{share}_ms": round(1000 * percentile(ordered, share), 2) for share in (50, 95, 99)},
            "max_ms": round(1000 * ordered[-1], 2),
        }


def percentile(ordered: list[float], share: float) -> float:
    """Nearest rank."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def get(path: str, port: int) -> bytes:
    """A GET request."""
    return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\naccept: application/json\r\n\r\n".encode()


def post(path: str, port: int, body: bytes) -> bytes:
    """A POST of JSON."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, int]:
    """Status and bytes of one answer, which is read whole."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        size = 0
        while (length := int((await reader.readuntil(b"\r\n")).strip(), 16)) > 0:
            await reader.readexactly(length + 2)
            size += length
        await reader.readexactly(2)
        return status, size
    length = int(lower.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]) if b"content-length:" in lower else 0
    await reader.readexactly(length)
    return status, length


async def closed_loop(port: int, target: Target, *, connections: int, seconds: float, at_most: int | None = None) -> Timings:
    """Each connection sends its next request when it has the answer to the last."""
    found, started = Timings(), time.perf_counter()
    count = 0

    async def one() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        while time.perf_counter() - started < seconds and (at_most is None or count < at_most):
            number, count = count, count + 1
            before = time.perf_counter()
            status, size = await exchange(reader, writer, target(number))
            found.seconds.append(time.perf_counter() - before)
            found.num_bytes += size
            found.num_errors += status >= 400
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    found.wall_s = time.perf_counter() - started
    return found


async def open_loop(port: int, target: Target, *, per_s: float, seconds: float, connections: int = 8) -> Timings:
    """Requests at fixed times, whatever the server does; time counts from when a request was due, so a queue counts as well."""
    found, started = Timings(), time.perf_counter()
    due: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        while (item := await due.get()) is not None:
            status, size = await exchange(reader, writer, target(item[0]))
            found.seconds.append(time.perf_counter() - item[1])
            found.num_bytes += size
            found.num_errors += status >= 400
        writer.close()

    workers = [asyncio.create_task(one()) for _ in range(connections)]
    for number in range(int(per_s * seconds)):
        at = started + number / per_s
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        due.put_nowait((number, at))
    for _ in workers:
        due.put_nowait(None)
    await asyncio.gather(*workers)
    found.wall_s = time.perf_counter() - started
    return found


class StreamReaders:
    """Many readers of one event stream; notes when each event id came to each of them."""

    def __init__(self, port: int, path: str, number: int) -> None:
        self.port, self.path, self.number = port, path, number
        self.arrivals: dict[str, list[float]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.num_ended = 0

    async def open(self) -> None:
        """Connect all."""
        for _ in range(self.number):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"GET {self.path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.split(b"\r\n", 1)[0] + b" ", head
            self._tasks.append(asyncio.create_task(self._read(reader, writer)))

    async def close(self) -> None:
        """Leave."""
        self.num_ended = sum(task.done() for task in self._tasks)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                if line.startswith(b"id: "):
                    self.arrivals.setdefault(line[4:].strip().decode(), []).append(time.time())
        finally:
            writer.close()
