"""Accepting a job: its directory first, durably, then the one transaction that makes it true."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from grpo_engine.contract.error import IdempotencyMismatch, InsufficientStorage
from grpo_engine.contract.job import JobSpec
from jobs.ledger.lineage import LineageBook
from jobs.ledger.records import IdempotencyKey, JobRecord
from jobs.ledger.spelling import canonical_json, new_id
from jobs.lifecycle import State, Wanted
from jobs.queue import queue_of
from jobs.tables import idempotency_keys, job_metadata, jobs
from jobs.traces import CURRENT, HEADER
from jobs.weights import WeightsInput, link_weights


@dataclass(frozen=True)
class NewJob:
    """What a job is made of; the paths are the uploads' contents, `weights` the checkpoints its spec names."""

    spec: JobSpec
    training_path: Path | None
    validation_path: Path | None = None
    weights: tuple[WeightsInput, ...] = ()


class CreationBook(LineageBook):
    """Creating jobs."""

    def create_job(
        self,
        spec: JobSpec,
        *,
        training_path: Path | None,
        validation_path: Path | None = None,
        weights: Sequence[WeightsInput] = (),
        idempotency: IdempotencyKey | None = None,
        project: str = "default",
    ) -> JobRecord:
        """Accept a job, or return the one this idempotency key created before.

        The paths are the uploads' contents, `weights` the checkpoints the spec names; the job gets links of its own. When this
        returns, the job survives a power cut; when it raises, nothing of it is left.
        Raises IdempotencyMismatch, InsufficientStorage, Unavailable.
        """
        if idempotency is not None and (earlier := self.find_idempotent(idempotency)) is not None:
            return earlier
        new, job_id, now = NewJob(spec, training_path, validation_path, tuple(weights)), new_id("ftjob"), self.clock()
        try:
            with self._all_or_nothing([job_id]):
                training, validation = self._lay_down(job_id, now, new, project, idempotency)
                with self.database.write() as connection:
                    earlier = None if idempotency is None else self._same_key(connection, idempotency)
                    if earlier is None:
                        self._insert(connection, job_id, now, spec, project, training, validation, idempotency)
                        self.record_lineage(connection, job_id, spec.model)
                        job = self._job(connection, job_id)
        except IntegrityError:
            if idempotency is None or (earlier := self.find_idempotent(idempotency)) is None:
                raise
            return earlier
        if earlier is not None:
            self.artifacts.remove_job_dir(job_id)
            return earlier
        return job

    @contextmanager
    def _all_or_nothing(self, job_ids: Sequence[str]) -> Iterator[None]:
        """The directories of these jobs go when what is done inside fails. Raises InsufficientStorage when the disk is full."""
        try:
            yield
        except BaseException as error:
            for job_id in job_ids:
                self.artifacts.remove_job_dir(job_id)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise InsufficientStorage("the disk of the data directory is full; free some space and try again") from error
            raise

    def _lay_down(
        self, job_id: str, now: float, new: NewJob, project: str, idempotency: IdempotencyKey | None, sweep: Mapping[str, Any] | None = None
    ) -> tuple[str | None, str | None]:
        """The job's directory, durably: its own names for what it reads, and job.json. Returns the paths of its files."""
        training = self._link(new.training_path, job_id, "training")
        validation = self._link(new.validation_path, job_id, "validation")
        link_weights(self.artifacts, job_id, new.weights)
        content = _job_json(job_id, now, new.spec, project, training, validation, idempotency)
        self.artifacts.write_job_json(job_id, content if sweep is None else {**content, "sweep": dict(sweep)})
        return training, validation

    def find_idempotent(self, idempotency: IdempotencyKey) -> JobRecord | None:
        """The job this key created; None when it is new. Raises IdempotencyMismatch when it came with another body."""
        with self.database.read() as connection:
            return self._same_key(connection, idempotency)

    def restore_job(
        self, job_id: str, created_at: float, spec: JobSpec, *, project: str,
        training: str | None, validation: str | None, idempotency: IdempotencyKey | None,
    ) -> None:  # fmt: skip
        """For a rebuild: the row of a job whose directory exists. An idempotency key that is taken stays with its first job."""
        with self.database.write() as connection:
            if idempotency is not None and self._key_row(connection, idempotency) is not None:
                idempotency = None
            self._insert(connection, job_id, created_at, spec, project, training, validation, idempotency)

    def note_restored(self, connection: sa.Connection, job_id: str, message: str) -> None:
        """For a rebuild: say in the history where the job comes from."""
        self._note(connection, job_id, "job.restored", message)

    def _key_row(self, connection: sa.Connection, idempotency: IdempotencyKey) -> sa.Row[Any, Any] | None:
        query = sa.select(idempotency_keys.c.job_id, idempotency_keys.c.body_sha256).where(
            idempotency_keys.c.scope == idempotency.scope, idempotency_keys.c.key == idempotency.key
        )
        return connection.execute(query).one_or_none()

    def _same_key(self, connection: sa.Connection, idempotency: IdempotencyKey) -> JobRecord | None:
        row = self._key_row(connection, idempotency)
        if row is None:
            return None
        if row.body_sha256 != idempotency.body_sha256:
            raise IdempotencyMismatch(
                f"this Idempotency-Key was used for job {row.job_id} with another body; use a new key for a new request",
                param="idempotency-key",
            )
        return self._job(connection, row.job_id)

    def _link(self, source: Path | None, job_id: str, role: str) -> str | None:
        if source is None:
            return None
        target = self.artifacts.link_input(source, job_id, role)
        return str(target.relative_to(self.artifacts.job_dir(job_id)))

    def _insert(
        self, connection: sa.Connection, job_id: str, now: float, spec: JobSpec, project: str,
        training: str | None, validation: str | None, idempotency: IdempotencyKey | None,
    ) -> None:  # fmt: skip
        resources = spec.method.grpo.resources
        connection.execute(
            sa.insert(jobs).values(
                id=job_id, project=project, created_at=now, updated_at=now, state=State.QUEUED, wanted=Wanted.RUN, epoch=0,
                not_before=0.0, queue=queue_of(resources.gpus), spec=spec_json(spec), training_path=training,
                validation_path=validation, status_reason="accepted", num_steps=spec.method.grpo.limits.num_steps, step=0,
                latest="{}", activity="", ingested_epoch=0, ingested_seq=0, crashes=0, worker_losses=0, preemptions=0,
                stuck_attempts=0, stuck_step=-1, settings_version=1,
            )
        )  # fmt: skip
        if spec.metadata:
            rows = [{"job_id": job_id, "key": key, "value": value} for key, value in spec.metadata.items()]
            connection.execute(sa.insert(job_metadata), rows)
        if idempotency is not None:
            connection.execute(
                sa.insert(idempotency_keys).values(
                    scope=idempotency.scope, key=idempotency.key, body_sha256=idempotency.body_sha256, job_id=job_id, created_at=now
                )
            )
        origin = CURRENT.get()
        data = None if origin is None else {HEADER: str(origin)}
        self._note(connection, job_id, "job.created", "The job was accepted.", data=data)


def spec_json(spec: JobSpec) -> str:
    """The resolved spec as canonical JSON."""
    return canonical_json(json.loads(spec.model_dump_json()))


def _job_json(
    job_id: str, now: float, spec: JobSpec, project: str, training: str | None, validation: str | None, idempotency: IdempotencyKey | None
) -> dict[str, object]:
    key = None
    if idempotency is not None:
        key = {"scope": idempotency.scope, "key": idempotency.key, "body_sha256": idempotency.body_sha256}
    return {
        "id": job_id,
        "created_at": now,
        "project": project,
        "spec": json.loads(spec.model_dump_json()),
        "training_path": training,
        "validation_path": validation,
        "idempotency": key,
    }
