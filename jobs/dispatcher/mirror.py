"""Keeps in Redis what supervisors must learn: the current epoch, what is wanted, and commands without an answer.

Written on each change, again every few seconds, and at once after a wipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from jobs.dispatcher.watch import RedisWatch
from jobs.ledger import CommandRecord, JobRecord, Ledger
from jobs.lifecycle import State, Wanted
from jobs.live import Live
from jobs.settings import Settings


class Mirror:
    """Wanted notes and commands."""

    def __init__(
        self, ledger: Ledger, live: Live, settings: Settings, watch: RedisWatch, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger = ledger
        self._live = live
        self._settings = settings
        self._watch = watch
        self._monotonic = monotonic
        self._notes: dict[str, tuple[int, Wanted]] = {}
        self._commands: dict[str, set[int]] = {}
        self._refresh_at = 0.0
        self._wipes = 0

    def sync(self, jobs: Sequence[JobRecord]) -> None:
        """Bring Redis in line with the ledger. Raises Unavailable; the next turn tries again."""
        is_refresh = self._monotonic() >= self._refresh_at or self._wipes != self._watch.wipes
        for job in jobs:
            note = (job.epoch, _wanted_of(job))
            if is_refresh or self._notes.get(job.id) != note:
                self._live.set_wanted(job.id, *note)
                self._notes[job.id] = note
        self._say_farewell({job.id for job in jobs})
        self._sync_commands(self._ledger.pending_commands(), is_refresh=is_refresh)
        if is_refresh:
            self._refresh_at = self._monotonic() + self._settings.lease_ttl_s / 4
            self._wipes = self._watch.wipes

    def _say_farewell(self, active: set[str]) -> None:
        """A job without an attempt: whoever still runs one shall end it."""
        for job_id in [job_id for job_id in self._notes if job_id not in active]:
            job = self._ledger.get_job(job_id)
            if job.state is not State.SUCCEEDED and not job.state.has_attempt:
                self._live.set_wanted(job_id, job.epoch, Wanted.CANCEL if job.is_terminal else Wanted.REQUEUE)
            del self._notes[job_id]

    def _sync_commands(self, pending: Mapping[str, Sequence[CommandRecord]], *, is_refresh: bool) -> None:
        for job_id, records in pending.items():
            known = self._commands.setdefault(job_id, set())
            for record in records:
                if is_refresh or record.number not in known:
                    self._live.put_command(job_id, record.command)
                    known.add(record.number)
        for job_id in list(self._commands):
            open_numbers = {record.number for record in pending.get(job_id, ())}
            for number in sorted(self._commands[job_id] - open_numbers):
                self._live.drop_command(job_id, number)
            self._commands[job_id] &= open_numbers
            if not self._commands[job_id]:
                del self._commands[job_id]


def _wanted_of(job: JobRecord) -> Wanted:
    return job.wanted if job.state is State.STOPPING else Wanted.RUN
