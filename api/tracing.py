"""A request's place in a distributed trace: the caller's `traceparent`, and, with a collector, a span and the time of each request."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import PUBLIC_PATHS
from jobs.otel import Otel, context_of, fail
from jobs.traces import CURRENT, HEADER, TraceContext

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_READING = frozenset({"GET", "HEAD"})
_UNTRACED = PUBLIC_PATHS | {"/metrics"}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Tracing:
    """Sets `jobs.traces.CURRENT` for what the request does. `reads`: share of the requests that only read that get a span."""

    def __init__(self, app: ASGIApp, *, otel: Otel | None, reads: float = 1.0) -> None:
        self.app = app
        self._otel = otel
        self._reads = reads
        if otel is not None:
            self._duration = otel.meter.create_histogram(
                "http.server.request.duration", "s", "Time until the last byte of the answer; of a stream, how long it was open"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = TraceContext.parse(dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1"))
        if self._otel is None or scope["path"] in _UNTRACED:
            CURRENT.set(given)
            await self.app(scope, receive, send)
            return
        await self._traced(self._otel, given, scope, receive, send)

    async def _traced(self, otel: Otel, given: TraceContext | None, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        span = self._begin(otel, given, method, scope)
        CURRENT.set(given if span is None else context_of(span))
        began, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "")
            facts = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
            self._duration.record(time.perf_counter() - began, facts)
            if span is not None:
                span.update_name(f"{method} {route}".rstrip())
                span.set_attributes(facts)
                if status >= 500:
                    fail(span, "")
                span.end()

    def _begin(self, otel: Otel, given: TraceContext | None, method: str, scope: Scope) -> Span | None:
        if given is None and method in _READING and random.random() >= self._reads:
            return None
        attributes = {
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
            "grpo.request_id": scope.get("state", {}).get("request_id", ""),
        }
        return otel.begin(method, given, kind="server", attributes=attributes)
