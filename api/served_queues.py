"""Which queues live workers serve, and with how many slots. Told from their heartbeats; nobody waits for a slow Redis."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from grpo_engine.contract.error import Unavailable
from jobs.live import Live
from jobs.queue import CPU_QUEUE, GPU_QUEUE

_FRESH_S = 1.0
_PATIENCE_S = 0.25
"""Longest a request waits for a look at Redis; after that it does with what is known."""

log = logging.getLogger(__name__)


class ServedQueues:
    """The latest look at the workers' heartbeats, renewed beside the request that asks."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="served-queues")
        self._lock = threading.Lock()
        self._look: Future[None] | None = None
        self._slots: Mapping[str, int] | None = None
        self._looked_at = float("-inf")

    def slots(self) -> Mapping[str, int] | None:
        """Slots by queue; at most about a second old. None while Redis does not say."""
        with self._lock:
            if self._look is None and time.monotonic() - self._looked_at > _FRESH_S:
                self._look = self._pool.submit(self._renew)
            look = self._look
        if look is not None:
            wait([look], timeout=_PATIENCE_S)
        return self._slots

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _renew(self) -> None:
        try:
            self._slots = slots_by_queue(self._live.workers())
        except Unavailable as error:
            log.info("who serves which queue is not known: %s", error)
            self._slots = None
        finally:
            with self._lock:
                self._looked_at = time.monotonic()
                self._look = None


def slots_by_queue(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Slots that live workers offer, by queue. A worker of several queues counts for each."""
    slots: dict[str, int] = {}
    for heartbeat in workers.values():
        for queue in heartbeat.get("queues", ()):
            slots[str(queue)] = slots.get(str(queue), 0) + int(heartbeat.get("slots", 1))
    return slots


def unserved(queue: str) -> str:
    """The words for a queue without a worker."""
    if queue == CPU_QUEUE:
        return f"no live worker serves {queue}; start one with `grpo worker`"
    if queue == GPU_QUEUE:
        return "no live worker serves grpo-gpu; start `grpo worker` on a machine with an NVIDIA GPU, or set method.grpo.resources.gpus to 0"
    return f"no live worker serves {queue}; start one with `grpo worker --queues {queue}`"
