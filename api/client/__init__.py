"""The Python SDK: `from api.client import Grpo`."""

from api.client.errors import ApiError, ClientError, ServerUnreachable
from api.client.sync import Grpo

__all__ = ["ApiError", "ClientError", "Grpo", "ServerUnreachable"]
