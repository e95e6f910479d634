"""A client that is slow with the head of its request loses its connection, and others never notice."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import ClassVar

import httpx
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

import api.protocol
from api.errors import problem_response
from api.middleware import BodyLimit, RequestStalled
from api.protocol import HeadDeadline
from tests.api.conftest import eventually


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body to its end and answers with its length."""
    assert scope["type"] == "http"
    size, is_more = 0, True
    while is_more:
        message = await receive()
        size, is_more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


class Short(HeadDeadline):
    head_timeout_s = 0.3
    most_owing = 1000
    owing: ClassVar[dict[HeadDeadline, asyncio.TimerHandle]] = {}


class Few(HeadDeadline):
    head_timeout_s = 3600.0
    most_owing = 5
    owing: ClassVar[dict[HeadDeadline, asyncio.TimerHandle]] = {}


class Server:
    """uvicorn in a thread, with a limit that slow clients could fill."""

    def __init__(self, protocol: type[HeadDeadline], limit: int) -> None:
        config = uvicorn.Config(
            application, port=0, http=protocol, log_level="error", lifespan="off", limit_concurrency=limit, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def get(self) -> int:
        return httpx.get(f"http://127.0.0.1:{self.port}/").status_code

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture(scope="module")
def short() -> Iterator[Server]:
    server = Server(Short, 1000)
    yield server
    server.stop()


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    received = b""
    while block := connection.recv(4096):
        received += block
    return received


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ", b"GET"], ids=["nothing", "headers", "a word"])
def test_a_head_that_is_not_whole_in_time_is_408(short: Server, begun: bytes) -> None:
    with short.connect() as connection:
        connection.sendall(begun)
        answer = rest_of(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert Short.owing == {}


def test_bytes_that_trickle_in_buy_no_time(short: Server) -> None:
    with short.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-A: ")
        connection.settimeout(0.05)
        answer = b""
        for _ in range(400):
            try:
                connection.sendall(b"a")
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_the_next_request_of_a_connection_has_a_deadline_of_its_own(short: Server) -> None:
    with short.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert b"HTTP/1.1 408 " in rest_of(connection)


def test_a_body_may_take_longer_than_a_head(short: Server) -> None:
    with short.connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na")
        connection.settimeout(4 * Short.head_timeout_s)
        with pytest.raises(TimeoutError):
            connection.recv(4096)
        connection.settimeout(20)
        connection.sendall(b"bc")
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n1\r\n3\r\n0\r\n\r\n"), "three bytes arrived"


def test_slow_clients_do_not_hold_the_places_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve of them fill the server's limit; without the rule everybody else would be 503."""
    monkeypatch.setattr(api.protocol, "GRACE_S", 0.0)
    server = Server(Few, 12)
    try:
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(server.connect()).sendall(b"GET / HTTP/1.1\r\nX-A: ")
            eventually(lambda: len(Few.owing) == Few.most_owing)
            assert [server.get() for _ in range(3)] == [200] * 3
            assert len(Few.owing) <= Few.most_owing
    finally:
        server.stop()
    assert Few.owing == {}


def test_a_body_that_trickles_is_given_up_and_a_slow_honest_one_is_not() -> None:
    """One byte now and then keeps no request alive for longer than the patience plus what its bytes are worth."""

    def attempt(size: int, least_rate: int) -> int:
        statuses: list[int] = []

        async def receive() -> Message:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b"x" * size, "more_body": True}

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                for _ in range(60):
                    await receive()
            except RequestStalled as error:
                await problem_response(error, "/")(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})

        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        asyncio.run(BodyLimit(app, limit=10_000, file_limit=10_000, stall_s=0.3, least_rate=least_rate)(scope, receive, send))
        return statuses[0]

    assert attempt(size=1, least_rate=1024) == 408
    assert attempt(size=100, least_rate=1024) == 200
