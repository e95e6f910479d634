"""Reading jobs: one, a page of them, how many of each kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from grpo_engine.contract.error import InvalidRequest
from jobs.ledger.book import Book
from jobs.ledger.records import JobRecord, Order, Page
from jobs.ledger.rows import job_record
from jobs.lifecycle import State
from jobs.tables import facts, job_metadata, jobs


class ListingBook(Book):
    """Reading jobs."""

    def get_job(self, job_id: str) -> JobRecord:
        """The job. Raises NotFound."""
        with self.database.read() as connection:
            return self._job(connection, job_id)

    def list_jobs(
        self,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
        states: Collection[State] | None = None,
        metadata: Mapping[str, str] | None = None,
        created_after: float | None = None,
        project: str | None = None,
    ) -> Page[JobRecord]:
        """A page in order of creation. The cursor is a job id; jobs that arrive meanwhile move nothing."""
        query = sa.select(jobs)
        with self.database.read() as connection:
            if after is not None:
                edge = connection.execute(sa.select(jobs.c.created_at, jobs.c.id).where(jobs.c.id == after)).one_or_none()
                if edge is None:
                    raise InvalidRequest(
                        f"after names no job: {after[:80]!r}; use the id of the last job of the page before", param="after"
                    )
                position, mark = sa.tuple_(jobs.c.created_at, jobs.c.id), sa.tuple_(edge.created_at, edge.id)
                query = query.where(position < mark if order == "desc" else position > mark)
            if states is not None:
                query = query.where(jobs.c.state.in_(sorted(states)))
            if created_after is not None:
                query = query.where(jobs.c.created_at > created_after)
            if project is not None:
                query = query.where(jobs.c.project == project)
            for key, value in (metadata or {}).items():
                has = sa.and_(job_metadata.c.job_id == jobs.c.id, job_metadata.c.key == key, job_metadata.c.value == value)
                query = query.where(sa.exists().where(has))
            way = sa.desc if order == "desc" else sa.asc
            rows = connection.execute(query.order_by(way(jobs.c.created_at), way(jobs.c.id)).limit(limit + 1)).all()
        return Page([job_record(row) for row in rows[:limit]], len(rows) > limit)

    def jobs_in(self, states: Collection[State]) -> list[JobRecord]:
        """All jobs in these states, oldest first."""
        query = sa.select(jobs).where(jobs.c.state.in_(sorted(states))).order_by(jobs.c.created_at, jobs.c.id)
        with self.database.read() as connection:
            return [job_record(row) for row in connection.execute(query)]

    def count_by_state(self) -> dict[State, int]:
        """How many jobs are in each state."""
        with self.database.read() as connection:
            rows = connection.execute(sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)).all()
        found = {State(state): int(count) for state, count in rows}
        return {state: found.get(state, 0) for state in State}

    def queue_ahead(self, job: JobRecord) -> int:
        """How many jobs of the same queue wait before this one."""
        waiting = jobs.c.state.in_([State.QUEUED, State.DISPATCHED])
        earlier = sa.tuple_(jobs.c.created_at, jobs.c.id) < sa.tuple_(sa.literal(job.created_at), sa.literal(job.id))
        with self.database.read() as connection:
            query = sa.select(sa.func.count()).select_from(jobs).where(waiting, jobs.c.queue == job.queue, earlier)
            return int(connection.execute(query).scalar_one())

    def get_fact(self, name: str) -> str | None:
        """A fact about this deployment."""
        with self.database.read() as connection:
            return connection.execute(sa.select(facts.c.value).where(facts.c.name == name)).scalar_one_or_none()

    def set_fact(self, name: str, value: str) -> None:
        """Record a fact, replacing what was known."""
        try:
            with self.database.write() as connection:
                if not self._update_fact(connection, name, value):
                    connection.execute(sa.insert(facts).values(name=name, value=value))
        except IntegrityError:  # somebody else recorded it at the same moment
            with self.database.write() as connection:
                self._update_fact(connection, name, value)

    @staticmethod
    def _update_fact(connection: sa.Connection, name: str, value: str) -> bool:
        return bool(connection.execute(sa.update(facts).where(facts.c.name == name).values(value=value)).rowcount)
