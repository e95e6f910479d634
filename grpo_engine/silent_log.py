"""The voice of a rank that is not the first: it says nothing, and remembers what was said as the first one does."""

from __future__ import annotations

import time
from typing import Any

from grpo_engine.contract.event import EngineEvent, Level, Progress
from grpo_engine.events import EventLog


class SilentLog(EventLog):
    """An event log without a file."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seq = self.num_dropped = self.num_write_failures = 0
        self.progress = Progress()

    def emit(
        self, kind: str, message: str, *, step: int | None = None, level: Level = "info", data: dict[str, Any] | None = None
    ) -> EngineEvent | None:
        """Follow the run, write nothing."""
        event = EngineEvent(epoch=self.epoch, seq=1, time=time.time(), type=kind, level=level, step=step, message="", data=data or {})
        self.progress = self.progress.after(event)
        return None

    @property
    def is_gone(self) -> bool:
        """There is no file that could vanish."""
        return False

    def flush(self) -> bool:
        """Nothing ever waits."""
        return True

    def close(self) -> None:
        """Nothing is open."""
