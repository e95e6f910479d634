"""One POST to one subscriber: within 10 s from first to last byte, no redirect followed, no proxy, little of the answer read."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass

import httpcore

from grpo_engine.outbound import signature
from grpo_engine.outbound.address import AddressRefused, check_url
from grpo_engine.outbound.connection import GuardedBackend

TIMEOUT_S = 10.0
ANSWER_BYTES = 16_384
"""Of the answer's body; it is read only so that the other side is not cut off, and thrown away."""


@dataclass(frozen=True)
class Sent:
    """How a try ended."""

    status_code: int | None
    """null: there was no answer."""
    error: str | None
    """Why it does not count as delivered."""
    retry_after_s: float | None = None
    is_final: bool = False
    """The subscriber said that the address is gone (410): do not try again."""

    @property
    def is_delivered(self) -> bool:
        """The subscriber took it."""
        return self.error is None


class Sender:
    """Sends deliveries; every call has a connection of its own. Safe to share between threads."""

    def __init__(self, *, allow_private: bool, timeout_s: float = TIMEOUT_S, trust: ssl.SSLContext | None = None) -> None:
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self._trust = trust or ssl.create_default_context()

    def send(self, url: str, identity: str, body: str, keys: list[str]) -> Sent:
        """POST the signed body. Never raises for what the other side does."""
        deadline = time.monotonic() + self._timeout_s
        try:
            check_url(url, allow_private=self._allow_private)
            backend = GuardedBackend(deadline, allow_private=self._allow_private)
            with httpcore.ConnectionPool(ssl_context=self._trust, network_backend=backend, retries=0, max_connections=1) as pool:
                return _post(pool, url, _headers(identity, body, keys), body)
        except AddressRefused as error:
            return Sent(None, str(error))
        except (httpcore.TimeoutException, TimeoutError):
            return Sent(None, f"no answer within {self._timeout_s:g} s")
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            return Sent(None, f"{type(error).__name__}: {error}"[:500])


def _headers(identity: str, body: str, keys: list[str]) -> dict[str, str]:
    signed = signature.headers(identity, int(time.time()), body, keys)
    return {"content-type": "application/json", "user-agent": "grpo-server", "accept": "*/*", **signed}


def _post(pool: httpcore.ConnectionPool, url: str, headers: dict[str, str], body: str) -> Sent:
    content = body.encode()
    pairs = [*headers.items(), ("content-length", str(len(content)))]
    limits = {"connect": TIMEOUT_S, "read": TIMEOUT_S, "write": TIMEOUT_S, "pool": TIMEOUT_S}
    with pool.stream("POST", url, headers=[(k, v) for k, v in pairs], content=content, extensions={"timeout": limits}) as answer:
        _read_some(answer.iter_stream())
        if 200 <= answer.status < 300:
            return Sent(answer.status, None)
        words = f"the subscriber answered {answer.status}"
        if 300 <= answer.status < 400:
            words += "; redirects are not followed, change the endpoint's url"
        return Sent(answer.status, words, _retry_after(answer.headers), is_final=answer.status == 410)


def _read_some(stream: Iterable[bytes]) -> None:
    read = 0
    for chunk in stream:
        read += len(chunk)
        if read > ANSWER_BYTES:
            return


def _retry_after(headers: list[tuple[bytes, bytes]]) -> float | None:
    text = next((value for name, value in headers if name.lower() == b"retry-after"), b"")
    return float(text) if text.isdigit() and len(text) < 7 else None
