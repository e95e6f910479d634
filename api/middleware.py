"""The two layers around every request: an id with a last resort for defects, and a cap on the body counted in bytes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import internal_error, problem_response
from grpo_engine.contract.error import InvalidRequest, PayloadTooLarge

logger = logging.getLogger("grpo.api")

_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DRAIN_FACTOR = 32
"""A refused body is read up to this many times its cap, so that the client gets to see the answer."""
_DRAIN_S = 10.0
MULTIPART_OVERHEAD = 65_536
"""Bytes a form may hold beside its file."""


class RequestStalled(InvalidRequest):
    """The client stopped sending in the middle of its body."""

    status = 408
    code = "request_stalled"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="body", headers={"connection": "close"})


class RequestId:
    """Puts `x-request-id` on every answer, with what the request's state holds in `answer_headers`, and turns an unhandled exception
    into the common error body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _given_id(scope) or f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers.update(scope["state"].get("answer_headers", {}))
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.info("%s %s: the client left before its body was read (request %s)", scope["method"], scope["path"], request_id)
        except Exception:
            logger.exception("%s %s failed (request %s)", scope["method"], scope["path"], request_id)
            if started:
                raise
            await internal_error(scope["path"])(scope, receive, send_with_id)


class BodyLimit:
    """Refuses bodies beyond their cap with 413, and those that stall or trickle with 408.

    Bytes are counted; Content-Length is a shortcut. A body may wait `stall_s` in all, and a second more for every `least_rate` bytes.
    """

    def __init__(self, app: ASGIApp, *, limit: int, file_limit: int, stall_s: float = 30.0, least_rate: int = 1024) -> None:
        self.app = app
        self.stall_s = stall_s
        self.least_rate = least_rate
        self.limit = limit
        self.file_limit = file_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_upload = scope["method"] == "POST" and scope["path"] == "/v1/files"
        cap = self.file_limit + MULTIPART_OVERHEAD if is_upload else self.limit
        declared = dict(scope["headers"]).get(b"content-length", b"")
        error = PayloadTooLarge(f"the body exceeds {cap} bytes; send less", param="body", headers={"connection": "close"})
        if declared.isdigit() and int(declared) > cap:
            await _drain(receive, 0, min(cap * _DRAIN_FACTOR, self.limit * _DRAIN_FACTOR))
            await problem_response(error, scope["path"])(scope, receive, send)
            return
        seen = 0
        waited = 0.0
        is_whole = False

        async def counted() -> Message:
            nonlocal seen, waited, is_whole
            began = time.monotonic()
            patience = min(self.stall_s, self.stall_s + seen / self.least_rate - waited)
            try:
                async with asyncio.timeout(None if is_whole else patience):
                    message = await receive()
            except TimeoutError:
                problem = f"no byte of the body came for {patience:.3g} s, and {seen} bytes in {waited + patience:.3g} s"
                raise RequestStalled(f"{problem}; send it again, faster") from None
            waited += time.monotonic() - began
            is_whole = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > cap:
                await _drain(receive, seen, self.limit * _DRAIN_FACTOR)
                raise error
            return message

        await self.app(scope, counted, send)


async def _drain(receive: Receive, seen: int, limit: int) -> None:
    try:
        async with asyncio.timeout(_DRAIN_S):
            while seen <= limit:
                message = await receive()
                seen += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return  # the answer goes out anyway; a client this slow may miss it


def _given_id(scope: Scope) -> str | None:
    raw = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return raw if _CLIENT_ID.fullmatch(raw) else None
