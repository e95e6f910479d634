"""Places in the queues, and when waiting jobs should start. Counting who waits before a job costs a look at every waiting job, so
all places are read together, at most once a second however many jobs are shown."""

from __future__ import annotations

import heapq
import json
import math
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from api.served_queues import ServedQueues, unserved
from jobs.database import Database
from jobs.ledger.records import JobRecord
from jobs.lifecycle import State
from jobs.tables import jobs

_FRESH_S = 1.0
_WAITING = (State.QUEUED, State.DISPATCHED)
_RUNNING = (State.RUNNING, State.STOPPING)
_LOOKED_BACK = 20
"""Jobs that ended lately, for the time of a step when none of the queue runs."""


@dataclass(frozen=True)
class Place:
    """Where a job stands in its queue."""

    ahead: int
    eta: int | None
    """Unix second at which it should start; None while no step of the queue has been measured, or nobody serves it."""
    note: str | None
    """Why it cannot start."""


@dataclass(frozen=True)
class _Load:
    """A job that runs or ran: seconds per step by its last measurement, and steps left."""

    step_s: float
    measured_at: float
    steps_left: int


class QueuePlaces:
    """How many jobs wait before each waiting job of the same queue; at most a second old, and never older than the job."""

    def __init__(self, database: Database, served: ServedQueues) -> None:
        self._database = database
        self._served = served
        self._lock = threading.Lock()
        self._places: dict[str, Place] = {}
        self._read_at = float("-inf")

    def place(self, job: JobRecord) -> Place | None:
        """None when the job does not wait."""
        if job.state not in _WAITING:
            return None
        slots = self._served.slots()
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S or job.id not in self._places:
                self._places = self._read(slots)
                self._read_at = time.monotonic()
            return self._places.get(job.id)

    def _read(self, slots: Mapping[str, int] | None) -> dict[str, Place]:
        columns = (jobs.c.id, jobs.c.queue, jobs.c.num_steps, jobs.c.step)
        with self._database.read() as connection:
            waiting = connection.execute(sa.select(*columns).where(jobs.c.state.in_(_WAITING)).order_by(jobs.c.created_at, jobs.c.id)).all()
            loads = {queue: self._loads(connection, queue) for queue in {row.queue for row in waiting}}
        places: dict[str, Place] = {}
        for queue in loads:
            rows = [row for row in waiting if row.queue == queue]
            steps = [row.num_steps - row.step for row in rows]
            served = None if slots is None else slots.get(queue, 0)
            starts = expected_starts(steps, *loads[queue], served, time.time())
            note = unserved(queue) if served == 0 else None
            places |= {row.id: Place(number, start, note) for number, (row, start) in enumerate(zip(rows, starts, strict=True))}
        return places

    def _loads(self, connection: sa.Connection, queue: str) -> tuple[list[_Load], float | None]:
        """What runs on the queue, and the usual seconds per step; None when nothing was measured."""
        columns = (jobs.c.latest, jobs.c.num_steps, jobs.c.step)
        mine = jobs.c.queue == queue
        running = connection.execute(sa.select(*columns).where(mine, jobs.c.state.in_(_RUNNING))).all()
        loads = [load for row in running if (load := _load(row.latest, row.num_steps, row.step)) is not None]
        measured = loads
        if not measured:
            ended = sa.select(*columns).where(mine, jobs.c.finished_at.is_not(None), jobs.c.step > 0)
            rows = connection.execute(ended.order_by(jobs.c.created_at.desc()).limit(_LOOKED_BACK)).all()
            measured = [load for row in rows if (load := _load(row.latest, row.num_steps, row.step)) is not None]
        return loads, statistics.median(load.step_s for load in measured) if measured else None


def expected_starts(
    steps: Sequence[int], running: Sequence[_Load], step_s: float | None, slots: int | None, now: float
) -> list[int | None]:
    """Unix seconds at which jobs with so many steps left should start, first come first served.

    `slots` None: as many as jobs run, at least one. Jobs that run without a measurement yet count as just begun.
    """
    if step_s is None or slots == 0:
        return [None] * len(steps)
    ends = sorted(max(now, load.measured_at + load.step_s * load.steps_left) for load in running)
    free = [*([now] * max(0, (slots or max(1, len(ends))) - len(ends))), *ends]
    heapq.heapify(free)
    starts: list[int | None] = []
    for number in steps:
        start = heapq.heappop(free)
        starts.append(int(start))
        heapq.heappush(free, start + step_s * number)
    return starts


def _load(latest_json: str, num_steps: int, step: int) -> _Load | None:
    latest = json.loads(latest_json)
    step_s = latest.get("metrics", {}).get("time/step_s")
    if not isinstance(step_s, int | float) or not math.isfinite(step_s) or step_s < 0:
        return None
    return _Load(float(step_s), float(latest["time"]), max(0, num_steps - step))
