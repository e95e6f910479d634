"""What attempts did: claims, events from stream and file, verdicts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from grpo_engine.contract.error import Unavailable
from grpo_engine.contract.event import EngineEvent
from jobs.artifacts import LEDGER_CLAIM
from jobs.event_files import read_events
from jobs.ledger import JobRecord, Ledger, Void
from jobs.lifecycle import State
from jobs.live import Live, StreamEntry
from jobs.settings import Settings
from jobs.weights import dispatch_paths

log = logging.getLogger(__name__)


class Intake:
    """Reads events.jsonl of each attempt from where it stopped; the ledger decides what is new."""

    def __init__(self, ledger: Ledger, live: Live, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._live = live
        self._settings = settings
        self._monotonic = monotonic
        self._offsets: dict[tuple[str, int], int] = {}
        self._next_look: dict[tuple[str, int], float] = {}

    def read_streams(self, jobs: Sequence[JobRecord]) -> dict[str, list[StreamEntry]]:
        """News of the attempts from Redis; nothing when it does not answer (the files have all of it)."""
        after = {job.id: f"{job.epoch}-{job.ingested[1]}" for job in jobs if job.state.has_attempt}
        try:
            return self._live.read_streams(after)
        except Unavailable as error:
            log.warning("the event streams cannot be read: %s", error)
            return {}

    def take(self, job: JobRecord, entries: Sequence[StreamEntry], *, redis_is_up: bool) -> None:
        """Bring one job's record up to date with its attempt."""
        if job.state is State.DISPATCHED:
            holder = self._ledger.artifacts.claim_holder(job.id, job.epoch)
            if holder is None:
                return
            if holder.get("worker_id") == LEDGER_CLAIM:
                self._ledger.settle(job.id, job.epoch, Void("The attempt was withdrawn before a worker had it."))
                return
            self._ledger.mark_running(job.id, job.epoch, str(holder.get("worker_id", "an unknown worker")))
        outcome = self._ledger.artifacts.outcome(job.id, job.epoch)
        has_gap = self._from_stream(job, entries)
        key = (job.id, job.epoch)
        if has_gap or outcome is not None or not redis_is_up or self._monotonic() >= self._next_look.get(key, 0.0):
            self.read_file(job)
        if outcome is not None:
            self._ledger.settle(job.id, job.epoch, outcome)

    def read_file(self, job: JobRecord) -> None:
        """Ingest what events.jsonl of the current attempt has beyond the last look."""
        key = (job.id, job.epoch)
        path = self._ledger.artifacts.events_path(job.id, job.epoch)
        while True:
            events, offset = read_events(path, self._offsets.get(key, 0))
            if offset == self._offsets.get(key, 0):
                break
            self._ledger.ingest(job.id, events, from_file=True)
            self._offsets[key] = offset
        self._next_look[key] = self._monotonic() + self._settings.file_check_s

    def forget(self, jobs: Sequence[JobRecord]) -> None:
        """Keep state for these jobs' current attempts only."""
        keys = {(job.id, job.epoch) for job in jobs}
        self._offsets = {key: value for key, value in self._offsets.items() if key in keys}
        self._next_look = {key: value for key, value in self._next_look.items() if key in keys}

    def _from_stream(self, job: JobRecord, entries: Sequence[StreamEntry]) -> bool:
        """Ingest stream entries; True when events before or among them are missing."""
        events: list[EngineEvent] = []
        is_damaged = False
        for entry in entries:
            try:
                event = EngineEvent.model_validate_json(entry.event)
            except ValidationError:
                log.warning("stream entry %s of job %s is damaged; its file is read instead", entry.id, job.id)
                is_damaged = True
                continue
            if event.stream_id == entry.id:
                events.append(event)
            else:
                log.warning("stream entry %s of job %s holds event %s; ignored", entry.id, job.id, event.stream_id)
                is_damaged = True
        return self._ledger.ingest(job.id, events).has_gap or is_damaged


def dispatch_json(job: JobRecord) -> str:
    """What the worker finds in Redis for an attempt; paths are relative to the job directory."""
    spec = json.loads(job.spec_json)
    files = {"training_file": job.training_path, "validation_file": job.validation_path, "resume_from": job.resume_from}
    return json.dumps({"spec": spec, **files, **dispatch_paths(spec)})
