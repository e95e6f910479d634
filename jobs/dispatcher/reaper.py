"""Finds attempts nobody looks after any more.

Time is monotonic and counted here, so no wall clock that jumps can make a job look lost; while Redis is away, was
wiped, or this process was asleep, and for one lease time after, nobody is judged.

A worker that is not heard of may live behind a partition and train on. The verdict on it is written where its engine
writes, before anything is chosen to resume from: from then on the engine deletes no state, and its supervisor ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from grpo_engine.contract.event import WORKER_LOST, Outcome
from jobs.dispatcher.intake import Intake
from jobs.dispatcher.watch import RedisWatch
from jobs.ledger import JobRecord, Ledger, Lost
from jobs.lifecycle import State
from jobs.live import Live
from jobs.settings import Settings

log = logging.getLogger(__name__)


class Reaper:
    """Requeues jobs whose lease has been gone for `lost_after_s`."""

    def __init__(
        self, ledger: Ledger, live: Live, settings: Settings, intake: Intake, watch: RedisWatch,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._live = live
        self._settings = settings
        self._intake = intake
        self._watch = watch
        self._monotonic = monotonic
        self._gone_since: dict[tuple[str, int], float] = {}

    def look(self, jobs: Sequence[JobRecord]) -> None:
        """Judge the attempts that were claimed. Raises Unavailable."""
        if not self._watch.is_settled:
            self._gone_since.clear()
            return
        running = [job for job in jobs if job.state in (State.RUNNING, State.STOPPING)]
        keys = {(job.id, job.epoch) for job in running}
        self._gone_since = {key: since for key, since in self._gone_since.items() if key in keys}
        for job in running:
            lease = self._live.lease(job.id)
            if lease is not None and lease.epoch >= job.epoch:
                self._gone_since.pop((job.id, job.epoch), None)
                continue
            gone_for = self._monotonic() - self._gone_since.setdefault((job.id, job.epoch), self._monotonic())
            if gone_for > self._settings.lost_after_s:
                self._reap(job, gone_for)

    def _reap(self, job: JobRecord, gone_for: float) -> None:
        message = f"The worker of attempt {job.epoch} has not been heard of for {gone_for:.0f} s."
        if self._ledger.artifacts.outcome(job.id, job.epoch) is None:
            log.warning("job %s: %s", job.id, message)
            self._fence(job, message)
        self._intake.read_file(job)
        self._ledger.settle(job.id, job.epoch, self._ledger.artifacts.outcome(job.id, job.epoch) or Lost(message))

    def _fence(self, job: JobRecord, message: str) -> None:
        verdict = Outcome(
            status="failed", reason=WORKER_LOST, message=message, retryable=True, last_step=job.step, resume_checkpoint=None
        )  # fmt: skip
        try:
            self._ledger.artifacts.write_outcome(job.id, job.epoch, verdict)
        except OSError as error:
            log.error("job %s: attempt %s cannot be told that it is given up: %s", job.id, job.epoch, error)
