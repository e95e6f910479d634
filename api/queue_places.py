"""Places in the queues. Counting who waits before a job costs a look at every waiting job, so all places are read in one query,
at most once a second however many jobs are shown."""

from __future__ import annotations

import threading
import time

import sqlalchemy as sa

from jobs.database import Database
from jobs.ledger.records import JobRecord
from jobs.lifecycle import State
from jobs.tables import jobs

_FRESH_S = 1.0
_WAITING = (State.QUEUED, State.DISPATCHED)


class QueuePlaces:
    """How many jobs wait before each waiting job of the same queue; at most a second old, and never older than the job."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._ahead: dict[str, int] = {}
        self._read_at = float("-inf")

    def ahead(self, job: JobRecord) -> int | None:
        """None when the job does not wait."""
        if job.state not in _WAITING:
            return None
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S or job.id not in self._ahead:
                self._ahead = self._read()
                self._read_at = time.monotonic()
            return self._ahead.get(job.id)

    def _read(self) -> dict[str, int]:
        place = sa.func.row_number().over(partition_by=jobs.c.queue, order_by=(jobs.c.created_at, jobs.c.id))
        with self._database.read() as connection:
            rows = connection.execute(sa.select(jobs.c.id, place).where(jobs.c.state.in_(_WAITING))).all()
        return {job_id: int(number) - 1 for job_id, number in rows}
