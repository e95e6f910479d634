"""What people ask of a running job: cancel, pause, resume, and numbered changes of its settings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import sqlalchemy as sa

from grpo_engine.contract.command import Command
from grpo_engine.contract.error import Conflict, PreconditionFailed
from jobs.artifacts import LEDGER_CLAIM
from jobs.ledger.book import Book, LostRace
from jobs.ledger.records import CommandRecord, JobRecord
from jobs.ledger.rows import command_record
from jobs.lifecycle import State, Wanted
from jobs.tables import commands, jobs

Request = Literal["cancel", "pause", "resume"]


class ControlBook(Book):
    """Requests, transitions and commands."""

    def request(self, job_id: str, wanted: Request, *, actor: str = "operator") -> JobRecord:
        """Cancel, pause or resume. Asking twice changes nothing more. Raises NotFound, or Conflict where it makes no sense."""
        with self.database.write() as connection:
            self.request_within(connection, job_id, wanted, actor)
            return self._job(connection, job_id)

    def request_within(self, connection: sa.Connection, job_id: str, wanted: Request, actor: str) -> None:
        """The same inside a transaction; a Conflict is raised before anything has changed."""
        job = self._job(connection, job_id, lock=True)
        if wanted == "cancel":
            self._cancel(connection, job, actor)
        elif wanted == "pause":
            self._pause(connection, job, actor)
        else:
            self._resume(connection, job, actor)

    def _cancel(self, connection: sa.Connection, job: JobRecord, actor: str) -> None:
        data = {"actor": actor}
        if job.state is State.CANCELLED or (job.state is State.STOPPING and job.wanted is Wanted.CANCEL):
            return
        if job.is_terminal:
            raise Conflict(f"job {job.id} has {job.state}; there is nothing left to cancel")
        if not job.state.has_attempt or self._withdraw(job):
            self._move(connection, job, State.CANCELLED, "Cancelled by request.", wanted=Wanted.CANCEL, data=data)
        elif job.state is State.STOPPING:
            connection.execute(sa.update(jobs).where(jobs.c.id == job.id).values(wanted=Wanted.CANCEL, updated_at=self.clock()))
            self._note(connection, job.id, "job.cancel_requested", "Cancel requested while stopping.", epoch=job.epoch, data=data)
        else:
            self._move(connection, job, State.STOPPING, "Cancel requested; the engine is being ended.", wanted=Wanted.CANCEL, data=data)

    def _pause(self, connection: sa.Connection, job: JobRecord, actor: str) -> None:
        data = {"actor": actor}
        if job.state is State.PAUSED or (job.state is State.STOPPING and job.wanted is Wanted.PAUSE):
            return
        if job.is_terminal:
            raise Conflict(f"job {job.id} has {job.state}; only a job that is not finished can be paused")
        if job.state is State.STOPPING and job.wanted is Wanted.CANCEL:
            raise Conflict(f"job {job.id} is being cancelled; it cannot be paused any more")
        if not job.state.has_attempt or self._withdraw(job):
            self._move(connection, job, State.PAUSED, "Paused by request.", wanted=Wanted.PAUSE, data=data)
        elif job.state is State.STOPPING:
            connection.execute(sa.update(jobs).where(jobs.c.id == job.id).values(wanted=Wanted.PAUSE, updated_at=self.clock()))
            self._note(connection, job.id, "job.pause_requested", "Pause requested while stopping.", epoch=job.epoch, data=data)
        else:
            message = "Pause requested; the engine finishes its step and writes a checkpoint."
            self._move(connection, job, State.STOPPING, message, wanted=Wanted.PAUSE, data=data)

    def _resume(self, connection: sa.Connection, job: JobRecord, actor: str) -> None:
        data = {"actor": actor}
        if job.is_terminal:
            raise Conflict(f"job {job.id} has {job.state}; a finished job cannot be resumed, fork it instead")
        if job.state is State.PAUSED:
            self._move(connection, job, State.QUEUED, "Resumed by request.", wanted=Wanted.RUN, not_before=0.0, data=data)
        elif job.state is State.STOPPING and job.wanted is Wanted.CANCEL:
            raise Conflict(f"job {job.id} is being cancelled; it cannot be resumed")
        elif job.state is State.STOPPING and job.wanted is Wanted.PAUSE:
            connection.execute(sa.update(jobs).where(jobs.c.id == job.id).values(wanted=Wanted.REQUEUE, updated_at=self.clock()))
            self._note(connection, job.id, "job.resume_requested", "Resume requested while pausing.", epoch=job.epoch, data=data)

    def _withdraw(self, job: JobRecord) -> bool:
        """Claim a dispatched attempt for the ledger, so that no worker can. False when a worker was first.

        If the transaction fails after this, the dispatcher finds the ledger's claim and queues the job anew.
        """
        return job.state is State.DISPATCHED and self.artifacts.claim(job.id, job.epoch, LEDGER_CLAIM)

    def transition(
        self,
        job_id: str,
        *,
        epoch: int,
        expected: Collection[State],
        to: State,
        reason: str,
        data: dict[str, Any] | None = None,
        **values: Any,
    ) -> JobRecord | None:
        """Move the job if it is still at this epoch in one of the expected states. None: somebody else was first."""
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            if job.epoch != epoch or job.state not in expected:
                return None
            try:
                self._move(connection, job, to, reason, data=data or {}, **values)
            except LostRace:
                return None
            return self._job(connection, job_id)

    # Commands

    def add_command(
        self,
        job_id: str,
        *,
        kind: Literal["set", "checkpoint"],
        beta: float | None = None,
        target: float | None = None,
        learning_rate: float | None = None,
        actor: str = "operator",
        if_version: int | None = None,
    ) -> CommandRecord:
        """Number and keep an instruction; it is re-sent until the engine answers.

        `if_version` is the `settings_version` the caller saw. Raises Conflict on a finished job, PreconditionFailed when
        the settings have changed since.
        """
        with self.database.write() as connection:
            job = self._job(connection, job_id, lock=True)
            if job.is_terminal or (job.state is State.STOPPING and job.wanted is Wanted.CANCEL):
                raise Conflict(f"job {job.id} is {job.state}; its settings cannot change any more")
            if if_version is not None and if_version != job.settings_version:
                raise PreconditionFailed("the settings changed since you read them; read them again and repeat the change")
            last = connection.execute(sa.select(sa.func.max(commands.c.number)).where(commands.c.job_id == job_id)).scalar_one()
            command = Command(
                number=(last or 0) + 1, type=kind, beta=beta, target=target, learning_rate=learning_rate, actor=actor
            )  # fmt: skip
            connection.execute(
                sa.insert(commands).values(
                    job_id=job_id,
                    number=command.number,
                    created_at=self.clock(),
                    body=command.model_dump_json(),
                    status="pending",
                    answer="{}",
                )
            )
            if kind == "set":
                connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(settings_version=job.settings_version + 1))
            data = {"command": command.model_dump(exclude_none=True)}
            self._note(
                connection, job_id, "control.requested", f"Command {command.number} was accepted.", epoch=job.epoch or None, data=data
            )
            return self._command(connection, job_id, command.number)

    def commands(self, job_id: str, *, pending_only: bool = False) -> list[CommandRecord]:
        """The job's commands by number. Raises NotFound."""
        query = sa.select(commands).where(commands.c.job_id == job_id).order_by(commands.c.number)
        if pending_only:
            query = query.where(commands.c.status == "pending")
        with self.database.read() as connection:
            self._job(connection, job_id)
            return [command_record(row) for row in connection.execute(query)]

    def pending_commands(self) -> dict[str, list[CommandRecord]]:
        """Commands without an answer, of all jobs that have an attempt."""
        active = jobs.c.state.in_([State.DISPATCHED, State.RUNNING, State.STOPPING])
        query = (
            sa.select(commands)
            .join(jobs, jobs.c.id == commands.c.job_id)
            .where(commands.c.status == "pending", active)
            .order_by(commands.c.job_id, commands.c.number)
        )
        found: dict[str, list[CommandRecord]] = {}
        with self.database.read() as connection:
            for row in connection.execute(query):
                found.setdefault(row.job_id, []).append(command_record(row))
        return found

    def _command(self, connection: sa.Connection, job_id: str, number: int) -> CommandRecord:
        query = sa.select(commands).where(commands.c.job_id == job_id, commands.c.number == number)
        return command_record(connection.execute(query).one())
