"""Responses read as they come, and how long a silent server is borne."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx

from api.client.errors import ApiError, ServerUnreachable


class Opened:
    """A response whose body is read as it comes."""

    def __init__(self, http: httpx.Client, url: str, method: str, path: str, request: Mapping[str, Any]) -> None:
        self._url = url
        self._context = http.stream(method, path, **request)

    def __enter__(self) -> httpx.Response:
        try:
            response = self._context.__enter__()
        except httpx.TransportError as error:
            raise ServerUnreachable(self._url, error) from error
        if not response.is_success:
            response.read()
            self._context.__exit__(None, None, None)
            raise ApiError.from_response(response)
        return response

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.__exit__(kind, error, trace)


class Patience:
    """Bears failures for a while, with growing pauses."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restore()

    def restore(self) -> None:
        """All is well again."""
        self._deadline: float | None = None
        self._pause_s = 0.25

    def bear(self, error: Exception) -> None:
        """Wait a moment, or raise `error` when patience has run out."""
        time.sleep(self.next_pause(error))

    def next_pause(self, error: Exception) -> float:
        """Seconds to wait before the next try; raises `error` when patience has run out."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._seconds
        if now >= self._deadline:
            raise error
        pause = self._pause_s
        self._pause_s = min(self._pause_s * 2, 5.0)
        return pause
