"""Errors on the wire: one body, readable as RFC 9457 problem details and as OpenAI's error object.

Every error of the server ends in `problem_response`. Nothing the client sent is echoed, so a value that JSON cannot spell
never reaches the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from grpo_engine.contract.error import GrpoError, InvalidRequest, NotFound

logger = logging.getLogger("grpo.api")

_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
PROBLEM_TYPE = "application/problem+json"
_LONGEST_MESSAGE, _LONGEST_PARAM = 4000, 500
"""Characters; a key of a request can be as long as the request."""


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


def problem_response(error: GrpoError, instance: str) -> JSONResponse:
    """The answer for an error. `instance` is the path of the request."""
    message = _cut(error.message, _LONGEST_MESSAGE)
    param = None if error.param is None else _cut(error.param, _LONGEST_PARAM)
    body = {
        "type": "about:blank",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": message,
        "instance": instance,
        "error": {"message": message, "type": error.type, "param": param, "code": error.code},
    }
    headers = dict(error.headers)
    if error.status in (500, 507):
        headers.setdefault("x-should-retry", "false")
    return JSONResponse(body, status_code=error.status, headers=headers, media_type=PROBLEM_TYPE)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def internal_error(instance: str) -> JSONResponse:
    """The answer when a defect of ours surfaced; the log holds the traceback under the same request id."""
    return problem_response(GrpoError("the server met an unexpected error; its log names it by this request's x-request-id"), instance)


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(GrpoError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)


def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GrpoError)
    if error.status == 404 and error.param is None:
        error.param = _unknown_in_path(request, error.message)
    if error.status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error.message)
    return problem_response(error, request.url.path)


def _unknown_in_path(request: Request, message: str) -> str | None:
    """The part of the path that the words are about: what was looked for stands in them."""
    given = request.path_params.items()
    named = [name for name, value in given if repr(str(value)) in message] or [name for name, value in given if str(value) in message]
    return named[-1] if named else None


def _on_validation(request: Request, error: Exception) -> Response:
    """FastAPI's own check of path, query and header parameters."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    place = {"query": "query parameter", "path": "path parameter", "header": "header"}.get(str(first["loc"][0]), "field")
    text = first["msg"][:1].lower() + first["msg"][1:]
    return problem_response(InvalidRequest(f"{place} {name}: {text}; change it accordingly", param=name or None), request.url.path)


def _methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """Every method of a path. The router itself names those of the first route that has the path."""
    offered = set()
    for method in _METHODS:
        asked = {**scope, "method": method}
        if any(route.matches(asked)[0] is Match.FULL for route in routes):
            offered.add(method)
    return sorted(offered)


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return problem_response(NotFound(f"there is nothing at {request.method} {request.url.path}", headers=headers), request.url.path)
    if error.status_code == 405:
        headers = {"allow": ", ".join(_methods(request.app.routes, request.scope))}
        message = f"{request.method} is not offered here; use {headers['allow']}"
        return problem_response(MethodNotAllowed(message, headers=headers), request.url.path)
    wrapped = InvalidRequest(str(error.detail), headers=headers)
    wrapped.status = error.status_code
    return problem_response(wrapped, request.url.path)
