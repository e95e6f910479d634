"""What can go wrong between client and server, in words for a person."""

from __future__ import annotations

from typing import Any

import httpx


class ClientError(Exception):
    """Base of everything the client raises on purpose."""


class ServerUnreachable(ClientError):
    """Nobody answers at the address."""

    def __init__(self, url: str, cause: Exception) -> None:
        super().__init__(f"no server answers at {url} ({cause}); start one with `grpo up`, or give its address with --url or GRPO_BASE_URL")


class ApiError(ClientError):
    """The server refused; its words, and the field they are about."""

    def __init__(self, status: int, code: str, message: str, param: str | None, request_id: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        """JSON path of the field, for example `method.grpo.beta.value`."""
        self.request_id = request_id

    @classmethod
    def from_response(cls, response: httpx.Response) -> ApiError:
        """Read the body's `error` object; anything else is quoted."""
        error: dict[str, Any] = {}
        try:
            content = response.json()
        except ValueError:
            content = None
        if isinstance(content, dict) and isinstance(content.get("error"), dict):
            error = content["error"]
        message = str(error.get("message") or f"the server answered {response.status_code}: {response.text[:200]}")
        return cls(
            response.status_code,
            str(error.get("code") or "unknown"),
            message,
            error.get("param"),
            response.headers.get("x-request-id"),
        )


class CannotSend(ClientError):
    """What was asked for fits in no request; nothing was sent."""


class UnknownAnswer(ClientError):
    """Something answered that is no GRPO server of a version this client knows."""

    def __init__(self, url: str, cause: Exception) -> None:
        first = str(cause).splitlines()[0]
        super().__init__(f"the answer of {url} is none of a GRPO server ({first}); look at the address given with --url or GRPO_BASE_URL")


class DownloadDamaged(ClientError):
    """A downloaded file is not what the server listed."""
