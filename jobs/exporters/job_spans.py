"""The dispatcher's share of a job's trace: a span for each publication of an attempt, and that of the whole job once it has ended.

How far it came is kept in the database by the time jobs ended, so that a restart leaves none out; a dispatcher that dies between
sending and keeping sends the same span, with the same ids, again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from jobs.exporters.watermarks import Watermarks
from jobs.ledger import JobRecord, Ledger
from jobs.ledger.rows import job_record
from jobs.lifecycle import State
from jobs.otel import Attributes, Otel, context_of, fail, nanoseconds
from jobs.tables import jobs
from jobs.traces import TraceContext

NAME = "otel"
MARK = "ended"
EVERY_S = 2.0
SETTLED_S = 1.0
"""A job that ended less than this ago may be joined by one that ended before it and is committed later; both wait."""
AT_ONCE = 100


class JobSpans:
    """Sends nothing when OpenTelemetry is off, and passes the context on all the same."""

    def __init__(self, ledger: Ledger, otel: Otel | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._otel = otel
        self._monotonic = monotonic
        self._marks = Watermarks(ledger.database, NAME)
        self._due_at = 0.0

    @contextmanager
    def publication(self, job: JobRecord) -> Iterator[TraceContext]:
        """Around the publication of an attempt; yields the parent of what the worker does."""
        trace = self._ledger.trace_of(job.id)
        if self._otel is None:
            yield trace
            return
        attributes: Attributes = {
            "messaging.system": "redis",
            "messaging.destination.name": job.queue,
            "grpo.job.id": job.id,
            "grpo.attempt": job.epoch,
        }
        span = self._otel.begin("publish attempt", trace, kind="producer", attributes=attributes)
        try:
            yield context_of(span)
        except Exception as error:
            fail(span, str(error))
            raise
        finally:
            span.end()

    def turn(self) -> None:
        """Send the spans of jobs that ended since the last look. Raises what the database raises."""
        if self._otel is None or self._monotonic() < self._due_at:
            return
        self._due_at = self._monotonic() + EVERY_S
        now = self._ledger.clock()
        since = self._marks.read(MARK).get("until")
        if since is None:  # the first time: what is over is over
            self._marks.write(MARK, {"until": now - SETTLED_S})
            return
        ended = sa.and_(jobs.c.finished_at > since, jobs.c.finished_at <= now - SETTLED_S, jobs.c.state.in_(_TERMINAL))
        with self._ledger.database.read() as connection:
            rows = connection.execute(sa.select(jobs).where(ended).order_by(jobs.c.finished_at).limit(AT_ONCE)).all()
        for row in rows:
            self._send(self._otel, job_record(row))
        if rows:
            self._marks.write(MARK, {"until": rows[-1].finished_at})

    def close(self) -> None:
        """Send what waits, for a moment."""
        if self._otel is not None:
            self._otel.close()

    def _send(self, otel: Otel, job: JobRecord) -> None:
        with self._ledger.database.read() as connection:
            origin = self._ledger.origin(connection, job.id)
        attributes: Attributes = {
            "grpo.job.id": job.id, "grpo.model": job.spec.model, "grpo.status": job.status, "grpo.attempts": job.epoch,
            "grpo.step": job.step, "grpo.num_steps": job.num_steps,
        }  # fmt: skip
        span = otel.begin("job", origin, start_s=job.created_at, attributes=attributes, own=self._ledger.trace_of(job.id))
        if job.state is State.FAILED:
            fail(span, job.status_reason)
        span.end(nanoseconds(job.finished_at))


_TERMINAL = tuple(state for state in State if state.is_terminal)
