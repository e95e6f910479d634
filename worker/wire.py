"""An attempt's line to Redis. Redis may be away, frozen or wiped at any moment: training never notices.

Each call answers within the client's socket timeout. After a failure the line stays quiet for a moment that doubles up
to a bound, so that a dead Redis costs the supervisor almost nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from grpo_engine.contract.command import Command
from grpo_engine.contract.error import Unavailable
from grpo_engine.contract.event import EngineEvent
from jobs.live import Live, WantedNote

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


class Wire:
    """Live state of one attempt, as its supervisor sees and writes it."""

    def __init__(self, live: Live, job_id: str, epoch: int, worker_id: str) -> None:
        self._live = live
        self._job_id = job_id
        self._epoch = epoch
        self._worker_id = worker_id
        self._quiet_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self.is_fenced = False
        """Redis has seen a newer attempt: this one shall end and say nothing more."""

    def publish(self, event: EngineEvent) -> bool:
        """Append one event to the stream; False when it must be tried again."""
        line = event.to_line()
        published = self._talk(lambda: self._live.publish_event(self._job_id, line, self._epoch, event.seq))
        if published == "fenced":
            self.is_fenced = True
        return published in ("appended", "duplicate")

    def renew_lease(self) -> None:
        """Say that this attempt is alive."""
        if self._talk(lambda: self._live.renew_lease(self._job_id, self._worker_id, self._epoch)) is False:
            self.is_fenced = True

    def release_lease(self) -> None:
        """The attempt has ended."""
        self._talk(lambda: self._live.release_lease(self._job_id, self._epoch))

    def wanted(self) -> WantedNote | None:
        """What the ledger wants of the job; None when Redis is away or does not know."""
        note = self._talk(lambda: self._live.get_wanted(self._job_id))
        if note is not None and note.epoch > self._epoch:
            self.is_fenced = True
        return note

    def commands(self) -> list[Command]:
        """Commands not yet answered, in order of their numbers."""
        return self._talk(lambda: self._live.commands(self._job_id)) or []

    def _talk(self, call: Callable[[], T]) -> T | None:
        if time.monotonic() < self._quiet_until:
            return None
        try:
            answer = call()
        except (Unavailable, ValueError, TypeError) as error:  # away, or holding what is not ours
            if self._pause_s == FIRST_PAUSE_S:
                log.warning("%s attempt %s: no use of Redis (%s); training goes on", self._job_id, self._epoch, error)
            self._quiet_until = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
            return None
        if self._pause_s != FIRST_PAUSE_S:
            log.warning("%s attempt %s: Redis answers again", self._job_id, self._epoch)
            self._pause_s = FIRST_PAUSE_S
        return answer
