"""What the engine says: read from events.jsonl, checked, published in order, each exactly once per line.

The file is the record; the stream is a copy for whoever watches live. What cannot be published waits here and is
tried again. A line that breaks the numbering is reported and not published: one absurd sequence number would close the
stream to everything after it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from grpo_engine.contract.event import EngineEvent, Progress
from jobs.event_files import read_events
from worker.attempt import Attempt
from worker.wire import Wire

log = logging.getLogger(__name__)


class Tail:
    """Reads one attempt's events as they grow."""

    def __init__(self, attempt: Attempt, listener: Callable[[Sequence[EngineEvent]], None] | None = None) -> None:
        """`listener` is told each event once, in order."""
        self._attempt = attempt
        self._listener = listener
        self._offset = 0
        self._last_seq = 0
        self._pending: deque[EngineEvent] = deque()
        self.progress = Progress()
        self.answered: set[int] = set()
        """Numbers of the commands the engine has applied or refused."""

    def read(self) -> None:
        """Take in what was appended since the last call."""
        events, self._offset = read_events(self._attempt.events_path, self._offset)
        for event in events:
            if event.epoch != self._attempt.epoch or event.seq != self._last_seq + 1:
                log.error(
                    "%s: event %s is out of order after %s-%s and is not published",
                    self._attempt,
                    event.stream_id,
                    self._attempt.epoch,
                    self._last_seq,
                )
                continue
            self._last_seq = event.seq
            self._observe(event)
            self._pending.append(event)
            if self._listener is not None:
                self._listener([event])

    def publish(self, wire: Wire, limit_s: float = math.inf) -> bool:
        """Send what waits; True when nothing is left. Ends after `limit_s`: a long backlog on a slow line must not hold up the lease."""
        until = time.monotonic() + limit_s
        while self._pending:
            if time.monotonic() >= until or not wire.publish(self._pending[0]):
                return False
            self._pending.popleft()
        return True

    def _observe(self, event: EngineEvent) -> None:
        self.progress = self.progress.after(event)
        match event.type, event.data:
            case "control.applied" | "control.refused", {"command": int(number)}:
                self.answered.add(number)


def progress_of(attempt: Attempt) -> Progress:
    """How far an attempt came, from its file alone."""
    tail = Tail(attempt)
    tail.read()
    return tail.progress
