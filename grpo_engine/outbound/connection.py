"""Connections to checked addresses only, in which no wait outlasts the deadline."""

from __future__ import annotations

import ssl
import time
from typing import Any

import httpcore

from grpo_engine.outbound.address import resolve


class GuardedBackend(httpcore.NetworkBackend):
    """Connects to checked addresses only, and lets nothing outlast the deadline."""

    def __init__(self, deadline: float, *, allow_private: bool) -> None:
        self._deadline = deadline
        self._allow_private = allow_private
        self._plain = httpcore.SyncBackend()

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None, socket_options: Any = None
    ) -> httpcore.NetworkStream:
        problem: Exception = OSError(f"{host} has no address")
        for address in resolve(host, port, allow_private=self._allow_private):
            try:
                stream = self._plain.connect_tcp(address, port, timeout=_left(self._deadline))
            except httpcore.ConnectError as error:
                problem = error
            else:
                return _DeadlineStream(stream, self._deadline)
        raise problem


class _DeadlineStream(httpcore.NetworkStream):
    """A stream whose every wait ends at the deadline."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time for this request is over")
    return left
