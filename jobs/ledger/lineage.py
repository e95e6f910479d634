"""Where a job's weights come from, which jobs go on from its own, and which sweep it is part of."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from jobs.ledger.book import Book
from jobs.ledger.records import JobRecord
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


def _line(kind: str, first: sa.Column[str], second: object, third: object, number: object) -> sa.Select[Any]:
    """One part of `_LINE_OF_ONE`: what it tells of, three texts, and a number to sort by."""
    texts: tuple[sa.Label[Any], ...] = (sa.literal_column(f"'{kind}'").label("kind"), first.label("first"))
    return sa.select(*texts, sa.type_coerce(second, sa.Text()).label("second"), sa.type_coerce(third, sa.Text()).label("third"),
                     sa.type_coerce(number, sa.Double()).label("number"))  # fmt: skip


def _line_of_one() -> sa.CompoundSelect[Any]:
    none: sa.ColumnElement[Any] = sa.cast(sa.null(), sa.Text())
    zero: sa.ColumnElement[Any] = sa.cast(sa.literal_column("0"), sa.Double())
    job: sa.BindParameter[str] = sa.bindparam("job", type_=sa.String())
    parent = _line("parent", lineage.c.parent_job, lineage.c.parent_checkpoint, lineage.c.root_model, zero)
    child = lineage.join(jobs, jobs.c.id == lineage.c.job_id)
    fork = _line("fork", lineage.c.job_id, none, none, jobs.c.created_at).select_from(child)
    place = _line("sweep", sweep_members.c.sweep_id, sweep_members.c.name, none, zero)
    return sa.union_all(
        parent.where(lineage.c.job_id == job), fork.where(lineage.c.parent_job == job), place.where(sweep_members.c.job_id == job)
    )


_LINE_OF_ONE = _line_of_one()


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

    def job_with_lineage(self, job_id: str) -> tuple[JobRecord, LineageRecord]:
        """A job and its place in its line, in one look and two statements: what every read of a job needs. Raises NotFound."""
        with self.database.read() as connection:
            job = self._job(connection, job_id)
            rows = connection.execute(_LINE_OF_ONE, {"job": job_id}).all()
        parent = next((row for row in rows if row.kind == "parent"), None)
        place = next((row for row in rows if row.kind == "sweep"), None)
        forks = sorted((row for row in rows if row.kind == "fork"), key=lambda row: (row.number, row.first))
        line = LineageRecord(
            parent_job=None if parent is None else parent.first,
            parent_checkpoint=None if parent is None else parent.second,
            root_model=None if parent is None else parent.third,
            forks=tuple(row.first for row in forks),
            sweep=None if place is None else place.first,
            sweep_member=None if place is None else place.second,
        )
        return job, line

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
