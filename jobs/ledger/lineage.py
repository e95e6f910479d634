"""Where a job's weights come from, which jobs go on from its own, and which sweep it is part of."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from jobs.ledger.book import Book
from jobs.tables import checkpoints, jobs, lineage, sweep_members

_CHECKPOINT_ID = re.compile(r"ftckpt-[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class LineageRecord:
    """A job's place in its line; all null for one that starts from a base model and that nobody goes on from."""

    parent_job: str | None = None
    parent_checkpoint: str | None = None
    root_model: str | None = None
    """The base model at the beginning of the line; null: the job's own model."""
    forks: tuple[str, ...] = ()
    """Jobs that start from a checkpoint of this one, oldest first."""
    sweep: str | None = None
    sweep_member: str | None = None
    """Its name in the sweep."""


class LineageBook(Book):
    """Lineage."""

    def lineages(self, job_ids: Collection[str]) -> dict[str, LineageRecord]:
        """Of these jobs, each present in the answer."""
        ids = sorted(set(job_ids))
        with self.database.read() as connection:
            rows = connection.execute(sa.select(lineage).where(lineage.c.job_id.in_(ids))).all() if ids else []
            both = lineage.join(jobs, jobs.c.id == lineage.c.job_id)
            children = sa.select(lineage.c.parent_job, lineage.c.job_id).select_from(both).where(lineage.c.parent_job.in_(ids))
            born = connection.execute(children.order_by(jobs.c.created_at, jobs.c.id)).all() if ids else []
            query = sa.select(sweep_members.c.job_id, sweep_members.c.sweep_id, sweep_members.c.name)
            places = connection.execute(query.where(sweep_members.c.job_id.in_(ids))).all() if ids else []
        swept = {row.job_id: row for row in places}
        forks: dict[str, list[str]] = {}
        for parent, child in born:
            forks.setdefault(parent, []).append(child)
        found = {row.job_id: row for row in rows}
        return {
            job_id: LineageRecord(
                parent_job=found[job_id].parent_job if job_id in found else None,
                parent_checkpoint=found[job_id].parent_checkpoint if job_id in found else None,
                root_model=found[job_id].root_model if job_id in found else None,
                forks=tuple(forks.get(job_id, ())),
                sweep=swept[job_id].sweep_id if job_id in swept else None,
                sweep_member=swept[job_id].name if job_id in swept else None,
            )
            for job_id in ids
        }

    def record_lineage(self, connection: sa.Connection, job_id: str, model: str) -> bool:
        """Note the parent of a job whose model is a checkpoint; False when it is none, or its job is not known (yet)."""
        parent = self._job_of(connection, model)
        if parent is None:
            return False
        root, seen = self._job(connection, parent).spec.model, {job_id, parent}
        while (above := self._job_of(connection, root)) is not None and above not in seen:
            root, seen = self._job(connection, above).spec.model, seen | {above}
        connection.execute(sa.insert(lineage).values(job_id=job_id, parent_job=parent, parent_checkpoint=model, root_model=root))
        self._note(connection, parent, "job.forked", f"Job {job_id} starts from a checkpoint.", data={"job": job_id, "checkpoint": model})
        return True

    def _job_of(self, connection: sa.Connection, model: str) -> str | None:
        """The job whose checkpoint a model is; None for a base model, and for a checkpoint nobody knows."""
        if _CHECKPOINT_ID.fullmatch(model) is None:
            return None
        return connection.execute(sa.select(checkpoints.c.job_id).where(checkpoints.c.id == model)).scalar_one_or_none()
