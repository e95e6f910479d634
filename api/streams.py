"""What the event streams say: history from the database, the live tail from Redis, each event once and in order.

The metrics stream goes by `<epoch>-<seq>`. An entry of Redis is passed on only when it follows the last one sent directly;
otherwise the database, which has the gap or will have it soon, is read first. A new attempt is always entered through the
database, because only that proves that the attempt before is complete. While Redis goes on without a gap the database is not
asked: what it could add is what Redis has just said, and two hundred readers would ask it at every step.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from api.deps import Services
from api.present import event_view, outcome_view
from api.sse import DEGRADED, DONE, HEARTBEAT, frame
from grpo_engine.contract.error import Unavailable
from grpo_engine.contract.event import encode_nonfinite
from jobs.event_files import last_seq
from jobs.ledger.records import JobRecord, StepRecord
from jobs.live import StreamEntry

END = "end"
"""Id of the last frame of a metrics stream."""
_PAGE = 500
_STEP, _REWIND = "step.completed", "run.rewound"


class Position(NamedTuple):
    """Place of an engine event."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"


START = Position(0, 0)


def parse_position(text: str) -> Position | None:
    """`<epoch>-<seq>`; None for anything else."""
    epoch, dash, seq = text.partition("-")
    is_right = dash and all(part.isascii() and part.isdecimal() and len(part) <= 16 for part in (epoch, seq))
    return Position(int(epoch), int(seq)) if is_right else None


def is_ahead(services: Services, job: JobRecord, place: Position) -> bool:
    """Whether the job has not said this yet. Asked in turn: the database, Redis, and the attempt's own file, which is written first."""
    if place <= Position(*job.ingested):
        return False
    if not 1 <= place.epoch <= job.epoch or place.seq < 1:
        return place.epoch > job.epoch
    with suppress(Unavailable):  # the file knows as well
        if services.live.read_stream(job.id, str(Position(place.epoch, place.seq - 1)), count=1):
            return False
    return last_seq(services.artifacts.events_path(job.id, place.epoch)) < place.seq


class _Beat:
    """Tells when a heartbeat is due."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last = time.monotonic()

    def reset(self) -> None:
        self._last = time.monotonic()

    def is_due(self) -> bool:
        if time.monotonic() - self._last < self._interval_s:
            return False
        self.reset()
        return True


async def event_frames(services: Services, job_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """The job's history after event number `after`, until the job has ended."""
    beat = _Beat(services.limits.heartbeat_s)
    yield HEARTBEAT
    while True:
        job = await run_in_threadpool(services.ledger.get_job, job_id)
        page = await run_in_threadpool(services.ledger.events, job_id, after=after, limit=_PAGE)
        for event in page.data:
            after = event.number
            beat.reset()
            yield frame(encode_nonfinite(event_view(event).model_dump()), event=event.type, event_id=event.id)
        if page.data:
            continue
        if job.is_terminal:
            yield DONE
            return
        if beat.is_due():
            yield HEARTBEAT
        await asyncio.sleep(services.limits.poll_s)


async def metric_frames(services: Services, job_id: str, after: Position) -> AsyncGenerator[bytes, None]:
    """Telemetry after `after`, until the job has ended."""
    feed = _Feed(services, job_id, after)
    beat = _Beat(services.limits.heartbeat_s)
    yield HEARTBEAT
    async with services.tails.reader():
        while True:
            frames, job = await run_in_threadpool(feed.from_database)
            for chunk in frames:
                beat.reset()
                yield chunk
            if frames:
                continue
            if job.is_terminal:
                break
            goes_on = True
            while goes_on:
                was_degraded = feed.is_degraded
                frames = await feed.from_redis()
                if feed.is_degraded and not was_degraded:
                    yield DEGRADED
                for chunk in frames:
                    beat.reset()
                    yield chunk
                if beat.is_due():
                    yield HEARTBEAT
                goes_on = bool(frames)
        outcome = await run_in_threadpool(outcome_view, job, None)
        yield frame(encode_nonfinite(outcome.model_dump()), event="job.finished", event_id=END)
        yield DONE


@dataclass
class _Item:
    position: Position
    type: str
    data: dict[str, Any]

    def frame(self) -> bytes:
        return frame(encode_nonfinite(self.data), event=self.type, event_id=str(self.position))


class _Feed:
    """Reads both sources and remembers how far the client is."""

    def __init__(self, services: Services, job_id: str, after: Position) -> None:
        self._services = services
        self._job_id = job_id
        self._position = after
        """Everything up to here was sent, or is of no interest to the stream."""
        self._retry_at = 0.0
        self.is_degraded = False

    def from_database(self) -> tuple[list[bytes], JobRecord]:
        """What the database has beyond the position, a page at a time, and the job as it was before that was read."""
        ledger = self._services.ledger
        job = ledger.get_job(self._job_id)
        known = Position(*job.ingested)
        if known <= self._position:
            return [], job
        steps = ledger.metrics_after(self._job_id, (self._position.epoch, self._position.seq), limit=_PAGE)
        until = Position(steps[-1].epoch, steps[-1].seq) if len(steps) == _PAGE else known
        items = [_step_item(step) for step in steps if _place(step) <= until] + self._rewinds(until)
        items.sort(key=lambda item: item.position)
        self._position = until
        return [item.frame() for item in items], job

    def _rewinds(self, until: Position) -> list[_Item]:
        page = self._services.ledger.events(self._job_id, types={_REWIND}, limit=100_000)
        found = [(Position(event.epoch or 0, event.seq or 0), event) for event in page.data]
        return [
            _Item(place, _REWIND, _rewind_data(place, event.time, event.data)) for place, event in found if self._position < place <= until
        ]

    async def from_redis(self) -> list[bytes]:
        """What follows the position in Redis without a gap; waits a moment when there is nothing."""
        if time.monotonic() < self._retry_at:
            await asyncio.sleep(self._services.limits.poll_s)
            return []
        try:
            entries = await self._services.tails.after(self._job_id, str(self._position))
        except Unavailable:
            self.is_degraded = True
            self._retry_at = time.monotonic() + self._services.limits.retry_redis_s
            return []
        self.is_degraded = False
        following = self._contiguous(entries)
        if entries and not following:
            await asyncio.sleep(self._services.limits.poll_s)
        frames = [_entry_frame(place, entry.event) for place, entry in following]
        return [chunk for chunk in frames if chunk is not None]

    def _contiguous(self, entries: list[StreamEntry]) -> list[tuple[Position, StreamEntry]]:
        taken: list[tuple[Position, StreamEntry]] = []
        for entry in entries:
            place = parse_position(entry.id)
            if place is None or place != Position(self._position.epoch, self._position.seq + 1):
                break
            self._position = place
            taken.append((place, entry))
        return taken


def _place(step: StepRecord) -> Position:
    return Position(step.epoch, step.seq)


def _step_item(step: StepRecord) -> _Item:
    return _Item(_place(step), _STEP, _step_data(_place(step), step.step, step.time, step.metrics, step.beta))


@lru_cache(maxsize=256)
def _entry_frame(place: Position, line: str) -> bytes | None:
    """The frame of an event's line, made once for all who read the stream; None for what is no telemetry."""
    event: dict[str, Any] = json.loads(line)
    data = event["data"]
    if event["type"] == _STEP:
        return _Item(place, _STEP, _step_data(place, event["step"], event["time"], data["metrics"], data.get("beta", {}))).frame()
    if event["type"] == _REWIND:
        return _Item(place, _REWIND, _rewind_data(place, event["time"], data)).frame()
    return None


def _step_data(place: Position, step: int, logged_at: float, metrics: dict[str, Any], beta: dict[str, Any]) -> dict[str, Any]:
    return {"step": step, "epoch": place.epoch, "seq": place.seq, "logged_at": int(logged_at), "metrics": metrics, "beta": beta}


def _rewind_data(place: Position, logged_at: float, data: dict[str, Any]) -> dict[str, Any]:
    return {"to_step": data.get("to_step"), "epoch": place.epoch, "seq": place.seq, "logged_at": int(logged_at)}
