"""A worker that has stopped hearing its queue: idle, while messages wait. It is told from one that is busy, and starts anew.

Clients of Redis have lost their subscription after reconnects more than once; nothing else would ever notice.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from celery.worker import state

from grpo_engine.contract.error import Unavailable
from jobs.live import Live

log = logging.getLogger(__name__)


class Hearing:
    """Watches from a thread. Deaf = no job here and a message waiting in one of the queues at every look of `deaf_after_s`."""

    def __init__(self, live: Live, queues: Sequence[str], deaf_after_s: float, is_busy: Callable[[], bool] | None = None) -> None:
        self._live = live
        self._queues = queues
        self._deaf_after_s = deaf_after_s
        self._is_busy = is_busy or (lambda: bool(state.active_requests) or bool(state.reserved_requests))
        self._since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hearing", daemon=True)
        self.is_deaf = False

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, now: float) -> bool:
        """One look; True once the worker is deaf. `now` is monotonic."""
        if self._is_busy() or not self._has_message():
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._deaf_after_s

    def _has_message(self) -> bool:
        try:
            return any(self._live.queued_messages(queue, limit=1) for queue in self._queues)
        except Unavailable:
            return False  # the heartbeat says that Redis is away

    def _run(self) -> None:
        while not self._stop.wait(self._deaf_after_s / 8):
            if self.look(time.monotonic()):
                log.error("messages wait and none has arrived for %g s; starting anew", self._deaf_after_s)
                self.is_deaf = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
