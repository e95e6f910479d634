"""Who may call: API keys with scopes, or, while no key exists, this machine only.

Every router but the public one carries `authorise`, so a route is closed unless it says which scope opens it; a route that says
nothing needs `admin`. `PUBLIC_PATHS` lists what answers without a key.
"""

from __future__ import annotations

import hmac
import ipaddress
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from fastapi import Request

from api.rate_limit import RateLimit, network_of, refuse
from grpo_engine.contract.error import Forbidden, InvalidRequest, Unauthorized
from jobs.ledger import Ledger

PUBLIC_PATHS = frozenset({"/", "/healthz", "/readyz"})
"""Beside the dashboard's files below /static, everything that needs no key."""

Scope = Literal["read", "submit", "control", "admin"]

_SETTINGS_KEY = "settings"
"""Id under which the key of the settings acts."""
_LOOK_AGAIN_S = 1.0

Endpoint = TypeVar("Endpoint", bound=Callable[..., object])


@dataclass(frozen=True)
class Caller:
    """Who sent the request; `name` is recorded as the actor of a change."""

    name: str
    key_id: str | None
    scopes: tuple[str, ...] = ("admin",)

    def allows(self, scope: Scope) -> bool:
        """Whether routes of `scope` are open; admin opens all."""
        return scope in self.scopes or "admin" in self.scopes


class KeyRing:
    """The keys of the ledger, and the one of the settings, which has every scope."""

    def __init__(self, ledger: Ledger, settings_key: str = "") -> None:
        self._ledger = ledger
        self._settings_key = settings_key
        self._lock = threading.Lock()
        self._has_keys = bool(settings_key)
        self._looked_at = float("-inf")

    def is_empty(self) -> bool:
        """Whether no key was ever made: the server is then keyless and serves this machine only. Looks at most once a second."""
        with self._lock:
            if not self._has_keys and time.monotonic() - self._looked_at > _LOOK_AGAIN_S:
                self._has_keys = bool(self._ledger.list_api_keys())
                self._looked_at = time.monotonic()
            return not self._has_keys

    def find(self, text: str) -> Caller | None:
        """The holder of a valid key, else None."""
        if self._settings_key and hmac.compare_digest(text.encode(), self._settings_key.encode()):
            return Caller(_SETTINGS_KEY, _SETTINGS_KEY)
        key = self._ledger.check_api_key(text)
        return None if key is None else Caller(key.name, key.id, key.scopes)


def requires(scope: Scope) -> Callable[[Endpoint], Endpoint]:
    """Decorator: the scope that opens this endpoint."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__grpo_scope__ = scope  # type: ignore[attr-defined]
        return endpoint

    return mark


def scope_of(endpoint: object) -> Scope:
    """The scope an endpoint declares; admin when it declares none."""
    scope: Scope = getattr(endpoint, "__grpo_scope__", "admin")
    return scope


def authorise(request: Request) -> Caller:
    """Router-level dependency. Raises Unauthorized (401), Forbidden (403), or RateLimited (429)."""
    ring: KeyRing = request.app.state.keys
    scope = scope_of(request.scope.get("endpoint"))
    caller: Caller | None
    if ring.is_empty():
        _require_loopback(request)
        caller = Caller("local", None)
    else:
        caller = ring.find(_bearer(request))
        if caller is None:
            _refuse(request)
        _count(request, caller)
        if not caller.allows(scope):
            raise Forbidden(f"key {caller.key_id} lacks the scope {scope!r}; use a key that has it", param="authorization")
    request.state.caller = caller
    return caller


def _refuse(request: Request) -> NoReturn:
    """Nobody's key. Raises Unauthorized, or RateLimited when this address has shown too many."""
    address = network_of("unknown" if request.client is None else request.client.host)
    limit: RateLimit = request.app.state.refused_limit
    allowance = limit.take(f"address:{address}")
    if allowance is not None and allowance.wait_s > 0:
        raise refuse(allowance, "your address, with keys that are not valid,")
    raise Unauthorized(
        "no valid API key; send Authorization: Bearer grpo_...", param="authorization", headers={"www-authenticate": "Bearer"}
    )


def _count(request: Request, caller: Caller) -> None:
    """Take one of the key's requests; the headers go on the answer, whatever it is. Raises RateLimited."""
    limit: RateLimit = request.app.state.rate_limit
    allowance = limit.take(f"key:{caller.key_id}")
    if allowance is None:
        return
    if allowance.wait_s > 0:
        raise refuse(allowance, f"key {caller.key_id}")
    request.state.answer_headers = allowance.headers()


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, ring: KeyRing) -> None:
    """Raises InvalidRequest when a server without keys would listen beyond this machine."""
    if not is_loopback(host) and ring.is_empty():
        raise InvalidRequest(
            f"refusing to listen on {host} without an API key; set GRPO_API_KEY or run `grpo keys create`, or listen on 127.0.0.1",
            param="host",
        )


def _require_loopback(request: Request) -> None:
    authority = request.headers.get("host", "").lower()
    if not is_loopback(_hostname(f"//{authority}")):
        raise Forbidden("without API keys the server answers to loopback names only; use http://127.0.0.1, or create a key", param="host")
    if request.client is not None and not is_loopback(request.client.host):
        raise Forbidden("without API keys the server answers this machine only; create a key")
    origin = request.headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{authority}", f"https://{authority}"):
        raise Forbidden("a page of another origin may not use this server; open the server's own page", param="origin")


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
