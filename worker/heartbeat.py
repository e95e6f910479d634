"""The worker's sign of life: who it is, what it offers, and when its event loop last turned."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_engine.contract.error import Unavailable
from jobs.live import Live

log = logging.getLogger(__name__)


class Heartbeat:
    """A thread that renews `grpo:worker:<id>`. Redis being away is logged once and survived."""

    def __init__(self, live: Live, worker_id: str, every_s: float, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._live = live
        self._worker_id = worker_id
        self._every_s = every_s
        self._describe = describe
        self._stop = threading.Event()
        self._is_away = False
        self._last_poll = time.time()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin; the first beat is immediate."""
        self._thread.start()

    def poll(self) -> None:
        """Called by the consumer's own timer: the loop that fetches jobs is turning."""
        self._last_poll = time.time()

    def stop(self) -> None:
        """End the thread and take the worker off the list."""
        self._stop.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        self._talk(lambda: self._live.remove_worker(self._worker_id))

    def _run(self) -> None:
        description = dict(self._describe())
        while not self._stop.is_set():
            self._talk(lambda: self._live.worker_heartbeat(self._worker_id, {**description, "last_poll": self._last_poll}))
            self._stop.wait(self._every_s)

    def _talk(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Unavailable as error:
            if not self._is_away:
                log.warning("the heartbeat does not reach Redis: %s", error)
            self._is_away = True
            return
        if self._is_away:
            log.warning("the heartbeat reaches Redis again")
        self._is_away = False
