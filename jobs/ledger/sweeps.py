"""Sweeps: several jobs accepted together, and asked together to stop or go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from grpo_engine.contract.error import Conflict, InvalidRequest, NotFound
from jobs.ledger.control import ControlBook, Request
from jobs.ledger.creation import CreationBook, NewJob
from jobs.ledger.records import CheckpointRecord, IdempotencyKey, JobRecord, Order, Page
from jobs.ledger.rows import checkpoint_record, job_record
from jobs.ledger.spelling import canonical_json, new_id
from jobs.tables import checkpoints, jobs, sweep_members, sweeps

_APART_S = 1e-6
"""Between the creation times of members, so that they are listed and started in the order of the request."""


@dataclass(frozen=True)
class NewMember:
    """A job to be accepted as part of a sweep."""

    name: str
    job: NewJob


@dataclass(frozen=True)
class MemberRecord:
    """A job's place in a sweep."""

    number: int
    """1, 2, 3 ... in the order of the request."""
    name: str
    job_id: str


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as the database knows it."""

    id: str
    project: str
    created_at: float
    name: str | None
    request: dict[str, Any]
    """Base spec and variants as they were posted."""
    members: tuple[MemberRecord, ...]


class SweepBook(CreationBook, ControlBook):
    """Sweeps."""

    def create_sweep(
        self,
        request: Mapping[str, Any],
        members: Sequence[NewMember],
        *,
        name: str | None = None,
        idempotency: IdempotencyKey | None = None,
        project: str = "default",
    ) -> SweepRecord:
        """Accept all jobs or none, in one transaction; or return the sweep this idempotency key created before.

        The key belongs to the first member, so it cannot be used for a single job as well. Raises as `create_job`.
        """
        if idempotency is not None and (earlier := self.find_idempotent_sweep(idempotency)) is not None:
            return earlier
        sweep_id, now = new_id("ftsweep"), self.clock()
        badge = {"id": sweep_id, "created_at": now, "name": name, "request": dict(request)}
        ids = [new_id("ftjob") for _ in members]
        try:
            with self._all_or_nothing(ids):
                paths = [
                    self._lay_down(
                        job_id, now + number * _APART_S, member.job, project, idempotency if number == 0 else None,
                        {**badge, "member": {"number": number + 1, "name": member.name}},
                    )
                    for number, (job_id, member) in enumerate(zip(ids, members, strict=True))
                ]  # fmt: skip
                with self.database.write() as connection:
                    earlier_job = None if idempotency is None else self._same_key(connection, idempotency)
                    if earlier_job is None:
                        self._insert_sweep(connection, badge, project)
                        for number, (job_id, member) in enumerate(zip(ids, members, strict=True)):
                            key, spec = idempotency if number == 0 else None, member.job.spec
                            self._insert(connection, job_id, now + number * _APART_S, spec, project, *paths[number], key)
                            self.record_lineage(connection, job_id, spec.model)
                            self._insert_member(connection, sweep_id, job_id, number + 1, member.name)
        except IntegrityError:
            if idempotency is None or (earlier := self.find_idempotent_sweep(idempotency)) is None:
                raise
            return earlier
        if earlier_job is not None:
            for job_id in ids:
                self.artifacts.remove_job_dir(job_id)
            return self._sweep_of(earlier_job)
        return self.get_sweep(sweep_id)

    def find_idempotent_sweep(self, idempotency: IdempotencyKey) -> SweepRecord | None:
        """The sweep this key created; None when it is new. Raises IdempotencyMismatch when it came with another body."""
        job = self.find_idempotent(idempotency)
        return None if job is None else self._sweep_of(job)

    def restore_membership(self, job_id: str, project: str, content: Mapping[str, Any]) -> None:
        """For a rebuild: the job's place in its sweep, from its job.json; the sweep itself comes with its first member."""
        member = content["member"]
        with self.database.write() as connection:
            known = connection.execute(sa.select(sweeps.c.id).where(sweeps.c.id == content["id"])).one_or_none()
            if known is None:
                self._insert_sweep(connection, content, project)
            self._insert_member(connection, str(content["id"]), job_id, int(member["number"]), str(member["name"]))

    def get_sweep(self, sweep_id: str) -> SweepRecord:
        """The sweep. Raises NotFound."""
        with self.database.read() as connection:
            found = _records(connection, connection.execute(sa.select(sweeps).where(sweeps.c.id == sweep_id)).all())
        if not found:
            raise NotFound(f"no sweep has the id {sweep_id[:80]!r}; check it against the list of sweeps")
        return found[0]

    def list_sweeps(self, *, after: str | None = None, limit: int = 20, order: Order = "desc") -> Page[SweepRecord]:
        """A page in order of creation; `after` is a sweep id. Raises InvalidRequest for one that is not there."""
        query = sa.select(sweeps)
        with self.database.read() as connection:
            if after is not None:
                edge = connection.execute(sa.select(sweeps.c.created_at, sweeps.c.id).where(sweeps.c.id == after)).one_or_none()
                if edge is None:
                    raise InvalidRequest(f"after names no sweep: {after[:80]!r}; use an id from the list", param="after")
                position, mark = sa.tuple_(sweeps.c.created_at, sweeps.c.id), sa.tuple_(edge.created_at, edge.id)
                query = query.where(position < mark if order == "desc" else position > mark)
            way = sa.desc if order == "desc" else sa.asc
            rows = connection.execute(query.order_by(way(sweeps.c.created_at), way(sweeps.c.id)).limit(limit + 1)).all()
            return Page(_records(connection, rows[:limit]), len(rows) > limit)

    def member_jobs(self, records: Sequence[SweepRecord]) -> dict[str, JobRecord]:
        """The jobs of these sweeps by id."""
        ids = [member.job_id for record in records for member in record.members]
        with self.database.read() as connection:
            return {row.id: job_record(row) for row in connection.execute(sa.select(jobs).where(jobs.c.id.in_(ids)))}

    def member_checkpoints(self, records: Sequence[SweepRecord]) -> dict[str, list[CheckpointRecord]]:
        """Published checkpoints that count and are still there, by job id, by step."""
        ids = [member.job_id for record in records for member in record.members]
        good = sa.and_(
            checkpoints.c.job_id.in_(ids), checkpoints.c.kind == "published", checkpoints.c.superseded.is_(False),
            checkpoints.c.deleted_at.is_(None),
        )  # fmt: skip
        found: dict[str, list[CheckpointRecord]] = {job_id: [] for job_id in ids}
        with self.database.read() as connection:
            for row in connection.execute(sa.select(checkpoints).where(good).order_by(checkpoints.c.step, checkpoints.c.epoch)):
                found[row.job_id].append(checkpoint_record(row))
        return found

    def request_sweep(self, sweep_id: str, wanted: Request, *, actor: str = "operator") -> SweepRecord:
        """Cancel, pause or resume every member in one transaction. Members that have ended, or cannot follow, are left as they are.

        Asking twice changes nothing more. Raises NotFound, or Conflict when no member can follow.
        """
        record = self.get_sweep(sweep_id)
        refusals: list[str] = []
        with self.database.write() as connection:
            for job_id in sorted(member.job_id for member in record.members):
                try:
                    self.request_within(connection, job_id, wanted, actor)
                except Conflict as error:
                    refusals.append(error.message)
        if len(refusals) == len(record.members):
            raise Conflict(f"no job of sweep {sweep_id} can {wanted}: {refusals[0]}")
        return record

    def _sweep_of(self, job: JobRecord) -> SweepRecord:
        with self.database.read() as connection:
            sweep_id = connection.execute(sa.select(sweep_members.c.sweep_id).where(sweep_members.c.job_id == job.id)).scalar_one()
        return self.get_sweep(sweep_id)

    def _insert_sweep(self, connection: sa.Connection, badge: Mapping[str, Any], project: str) -> None:
        values = {"id": badge["id"], "project": project, "created_at": badge["created_at"], "name": badge["name"]}
        connection.execute(sa.insert(sweeps).values(**values, request=canonical_json(badge["request"])))

    def _insert_member(self, connection: sa.Connection, sweep_id: str, job_id: str, number: int, name: str) -> None:
        connection.execute(sa.insert(sweep_members).values(job_id=job_id, sweep_id=sweep_id, number=number, name=name))


def _records(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[SweepRecord]:
    members: dict[str, list[MemberRecord]] = {row.id: [] for row in rows}
    query = sa.select(sweep_members).where(sweep_members.c.sweep_id.in_(list(members))).order_by(sweep_members.c.number)
    for member in connection.execute(query) if rows else ():
        members[member.sweep_id].append(MemberRecord(member.number, member.name, member.job_id))
    return [SweepRecord(row.id, row.project, row.created_at, row.name, json.loads(row.request), tuple(members[row.id])) for row in rows]
