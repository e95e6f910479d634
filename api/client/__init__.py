"""The Python SDK: `from api.client import Grpo` (or `AsyncGrpo`)."""

from api.client.asynchronous import AsyncGrpo
from api.client.errors import ApiError, ClientError, ServerUnreachable
from api.client.sync import Grpo

__all__ = ["ApiError", "AsyncGrpo", "ClientError", "Grpo", "ServerUnreachable"]
