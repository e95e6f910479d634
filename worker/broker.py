"""The broker as this worker reads it: what is no message is thrown away.

Kombu's Redis transport lets a line that is not JSON, or lacks a message's parts, end the whole worker, and a running job
with it. Whoever can write to Redis could do that by accident. Everything else is kombu's.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis

log = logging.getLogger(__name__)


class Channel(redis.Channel):  # type: ignore[misc]
    """Reads one queue entry at a time and survives those that are not JSON."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            log.error("an entry of the queue is not JSON and is thrown away: %s", error)
            return True


class Transport(redis.Transport):  # type: ignore[misc]
    """Delivers what has the shape of a message."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        if is_message(message):
            super()._deliver(message, queue)
        else:
            log.error("an entry of the queue %s is no message and is thrown away: %.200r", queue, message)


def is_message(entry: Any) -> bool:
    """Whether kombu can make a message of it."""
    if not isinstance(entry, dict) or not isinstance(entry.get("body"), str) or not isinstance(entry.get("headers"), dict):
        return False
    properties = entry.get("properties")
    return isinstance(properties, dict) and "delivery_tag" in properties and isinstance(properties.get("delivery_info"), dict)


def use_careful_broker() -> None:
    """Make every Redis connection of Celery in this process read this way."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:{Transport.__name__}"
