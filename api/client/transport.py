"""Responses read as they come, and how long a silent server is borne."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from api.client.errors import ApiError, CannotSend, ServerUnreachable, UnknownAnswer

Answer = TypeVar("Answer", bound=BaseModel)

RETRY_STATUSES = (429, 503)
MAX_RETRIES = 3
LONGEST_RETRY_AFTER_S = 30.0
STREAM_TIMEOUT_S = 45.0
"""A stream silent for longer than its heartbeats is dead."""


def server_address(base_url: str) -> str:
    """The address, without the `/v1` that the openai SDK's base URL ends in. Raises CannotSend when it is none."""
    try:
        url = httpx.URL(urlsplit(base_url).geturl())
    except (httpx.InvalidURL, ValueError) as error:
        raise CannotSend(f"{base_url!r} is no address of a server ({error}); give one such as http://127.0.0.1:8000") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise CannotSend(f"{base_url!r} is no address of a server; give one such as http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1")


def key_header(api_key: str | None) -> dict[str, str]:
    """The header that carries the key. Raises CannotSend when no header can."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise CannotSend("the API key holds a line break or a letter that no key has; copy it again")
    return {"authorization": f"Bearer {api_key}"}


@contextmanager
def sendable() -> Iterator[None]:
    """Turns what httpx says of values that fit in no request into CannotSend: NaN in JSON, letters no header or address can hold."""
    try:
        yield
    except (ValueError, httpx.InvalidURL) as error:
        raise CannotSend(f"this cannot be sent: {error}") from error


def read_answer(kind: type[Answer], response: httpx.Response, url: str) -> Answer:
    """The body as a contract view. Raises UnknownAnswer."""
    try:
        return kind.model_validate_json(response.content, extra="ignore")
    except ValidationError as error:
        raise UnknownAnswer(url, error) from error


class Opened:
    """A response whose body is read as it comes."""

    def __init__(self, http: httpx.Client, url: str, method: str, path: str, request: Mapping[str, Any]) -> None:
        self._url = url
        self._context = http.stream(method, path, **request)

    def __enter__(self) -> httpx.Response:
        try:
            with sendable():
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


def unbroken(response: httpx.Response, url: str) -> Iterator[bytes]:
    """The body in pieces. Raises ServerUnreachable when it breaks off."""
    try:
        yield from response.iter_bytes()
    except httpx.TransportError as error:
        raise ServerUnreachable(url, error) from error


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


def is_worth_repeating(error: httpx.TransportError, method: str, request: Mapping[str, Any]) -> bool:
    """Whether a request whose answer was lost may go out again: somebody was there, and twice does no more than once."""
    was_heard = isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError | httpx.CloseError)
    is_same_twice = method in ("GET", "PUT", "DELETE") or "idempotency-key" in (request.get("headers") or {})
    return was_heard and is_same_twice


def retry_after(response: httpx.Response, otherwise: float) -> float:
    """Seconds the server asks to wait."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else otherwise


def is_loopback(url: str) -> bool:
    """Whether the address is this machine, where no proxy may stand between."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
