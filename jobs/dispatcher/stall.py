"""Says when an engine is silent though its worker lives. Nothing is done about it: a step takes as long as it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jobs.ledger import JobRecord, Ledger
from jobs.lifecycle import State
from jobs.settings import Settings

STALLED = "Stalled: "
"""How `status_reason` of a stalled job begins; a dispatcher that was restarted knows it by that."""


class StallWatch:
    """Counts, in monotonic time, how long each running attempt has brought no event."""

    def __init__(self, ledger: Ledger, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._settings = settings
        self._monotonic = monotonic
        self._heard: dict[tuple[str, int], tuple[int, float]] = {}

    def look(self, jobs: Sequence[JobRecord]) -> None:
        """Flag attempts that have fallen silent, and take the flag from those that speak again."""
        now = self._monotonic()
        running = {(job.id, job.epoch): job for job in jobs if job.state is State.RUNNING}
        self._heard = {key: heard for key, heard in self._heard.items() if key in running}
        for key, job in running.items():
            seq = job.ingested[1]
            if key not in self._heard:
                self._heard[key] = (seq, now)
                continue
            known, since = self._heard[key]
            is_stalled = job.status_reason.startswith(STALLED)
            if seq != known:
                self._heard[key] = (seq, now)
                if is_stalled:
                    self._ledger.note_stall(job.id, job.epoch, f"Attempt {job.epoch} goes on.", kind="job.recovered")
            elif not is_stalled and now - since >= self._settings.stalled_after_s:
                message = f"{STALLED}no step and no other word from attempt {job.epoch} for {now - since:.0f} s; its worker lives."
                self._ledger.note_stall(job.id, job.epoch, message, kind="job.stalled")
