"""From queued to claimed: mint the attempt, leave what it needs in Redis, publish the hint, publish again what got lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from jobs.dispatcher.intake import Intake, dispatch_json
from jobs.dispatcher.resume import ResumeChooser
from jobs.dispatcher.watch import RedisWatch
from jobs.exporters.job_spans import JobSpans
from jobs.ledger import JobRecord, Ledger
from jobs.ledger.attempts import MAX_BACKOFF_S
from jobs.lifecycle import State, Wanted
from jobs.live import Live
from jobs.queue import Publisher, message_ids, task_id
from jobs.settings import Settings

log = logging.getLogger(__name__)


class Outbox:
    """Dispatch and publication."""

    def __init__(
        self, ledger: Ledger, live: Live, publisher: Publisher, settings: Settings, intake: Intake, watch: RedisWatch, spans: JobSpans,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._live = live
        self._publisher = publisher
        self._settings = settings
        self._intake = intake
        self._watch = watch
        self._spans = spans
        self._monotonic = monotonic
        self._resume = ResumeChooser(ledger)
        self._asked_at: dict[tuple[str, int], float] = {}
        """When the attempt's message was last published or last seen in its queue."""
        self._wipes = 0

    def close(self) -> None:
        """Let go of threads and connections."""
        self._resume.close()
        self._publisher.close()

    def dispatch(self, job: JobRecord) -> None:
        """Give a queued job whose time has come its next attempt, and publish it."""
        wait = job.not_before - self._ledger.clock()
        if 0 < wait <= MAX_BACKOFF_S:  # more than that is a clock that jumped
            return
        if job.epoch > 0:
            self._intake.read_file(job)
        choice = self._resume.choose(job)
        if choice is None:
            return
        dispatched = self._ledger.dispatch(job.id, from_epoch=job.epoch, resume_step=choice.step, resume_from=choice.path)
        if dispatched is not None:
            self.publish(dispatched)

    def publish(self, job: JobRecord) -> None:
        """Leave the dispatch in Redis, then the hint in the queue. Raises Unavailable; the next turn tries again."""
        self._live.put_dispatch(job.id, job.epoch, dispatch_json(job))
        self._live.set_wanted(job.id, job.epoch, Wanted.RUN)
        with self._spans.publication(job) as trace:
            self._publisher.enqueue(job.id, job.epoch, job.queue, trace)
        self._ledger.mark_published(job.id, job.epoch)
        self._asked_at[job.id, job.epoch] = self._monotonic()

    def chase(self, jobs: Sequence[JobRecord]) -> None:
        """Publish what never was, and what nobody claimed though its message is gone."""
        waiting = [job for job in jobs if job.state is State.DISPATCHED]
        now = self._monotonic()
        keys = {(job.id, job.epoch) for job in waiting}
        self._asked_at = {key: since for key, since in self._asked_at.items() if key in keys}
        if self._wipes != self._watch.wipes:
            # Their messages are gone for certain; one lease time passes before they are published anew.
            self._wipes = self._watch.wipes
            self._asked_at = dict.fromkeys(keys, now - self._settings.republish_after_s)
        in_queue: dict[str, set[str]] = {}
        for job in waiting:
            if job.published_at is None:
                self.publish(job)
            elif now - self._asked_at.setdefault((job.id, job.epoch), now) >= self._settings.republish_after_s and self._watch.is_settled:
                if job.queue not in in_queue:
                    in_queue[job.queue] = message_ids(self._live.queued_messages(job.queue))
                if task_id(job.id, job.epoch) in in_queue[job.queue]:
                    self._asked_at[job.id, job.epoch] = now
                else:
                    log.warning("attempt %d of job %s is in no queue and claimed by nobody; published again", job.epoch, job.id)
                    self.publish(job)
