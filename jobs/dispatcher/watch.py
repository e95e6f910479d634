"""Whether Redis can be believed: up, writable, and the one we knew."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable

from grpo_engine.contract.error import Unavailable
from jobs.ledger import Ledger
from jobs.live import Live
from jobs.settings import Settings

GENERATION_FACT = "redis_generation"

log = logging.getLogger(__name__)


class RedisWatch:
    """Looks at Redis once a turn."""

    def __init__(self, ledger: Ledger, live: Live, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._live = live
        self._settings = settings
        self._monotonic = monotonic
        self._looked_at: float | None = None
        self.is_up = True
        self.wipes = 0
        """How often the generation mark was found missing or foreign; who caches what Redis holds compares this."""
        self.settled_at = float("-inf")
        """Until then an absent lease proves nothing, and what vanished is not published anew: live supervisors re-assert themselves."""

    @property
    def is_settled(self) -> bool:
        """Whether Redis has been up, whole and watched for one lease time."""
        return self.is_up and self._monotonic() >= self.settled_at

    def look(self) -> bool:
        """Whether Redis takes reads and writes now."""
        now = self._monotonic()
        if self._looked_at is not None and now - self._looked_at > self._settings.lease_ttl_s:
            log.warning("this process was asleep for %.0f s; leases count anew", now - self._looked_at)
            self._unsettle()
        self._looked_at = now
        known = self._ledger.get_fact(GENERATION_FACT)
        try:
            self._live.ping()
            self._live.dispatcher_heartbeat({"pid": os.getpid(), "host": socket.gethostname(), "time": self._ledger.clock()})
            self._check_generation(known, self._live.generation())
        except Unavailable as error:
            if self.is_up:
                log.warning("%s; training goes on, dispatch and loss detection wait", error)
            self.is_up = False
            return False
        if not self.is_up:
            log.warning("Redis answers again")
            self._unsettle()
        self.is_up = True
        return True

    def _check_generation(self, known: str | None, found: str | None) -> None:
        if known is None:
            known = found or str(uuid.uuid4())
            self._ledger.set_fact(GENERATION_FACT, known)
        elif found != known:
            self.wipes += 1
            self._unsettle()
            if found is None:
                log.warning("Redis was wiped; what it held is put back")
            else:
                log.error("Redis carries the mark of another deployment; give each deployment its own Redis database")
        if found != known:
            self._live.set_generation(known)

    def _unsettle(self) -> None:
        self.settled_at = self._monotonic() + self._settings.lease_ttl_s
