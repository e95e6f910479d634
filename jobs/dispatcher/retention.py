"""Deletes checkpoints that are no longer needed: old resume states, and published ones beyond `checkpoints.keep`; and rollouts.

A published checkpoint goes only when newer ones were accepted (one from a stretch that is being done anew, when that
stretch was); pinned ones stay. Of the resume states of earlier
attempts, those older than the current attempt's go; a job that succeeded or was cancelled keeps none. What an engine that was
killed left half written, and resume states it never announced, go once its attempt is over; published weights do not. An engine bounds the
rollouts of its own attempt; here those of earlier attempts go, so that all attempts together keep `telemetry.rollouts_keep` steps.
"""

from __future__ import annotations

import logging
import shutil

from jobs.ledger import CheckpointRecord, JobRecord, Ledger
from jobs.lifecycle import State

log = logging.getLogger(__name__)


class Retention:
    """Retires checkpoints."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def sweep(self, job: JobRecord) -> None:
        """Delete what the job no longer needs; the row first, so that nothing listed is missing."""
        for record in self._due(job):
            self._ledger.mark_checkpoint(record.id, is_deleted=True)
            directory = self._ledger.artifacts.checkpoint_dir(job.id, record.epoch, record.name)
            if directory.exists():
                shutil.rmtree(directory)
                log.info("checkpoint %s of attempt %d of job %s was deleted", record.name, record.epoch, job.id)
        self._sweep_strays(job)
        self._sweep_rollouts(job)

    def _sweep_strays(self, job: JobRecord) -> None:
        artifacts = self._ledger.artifacts
        listed = {(record.epoch, record.name) for records in self._ledger.stored_checkpoints(job.id) for record in records}
        for epoch in artifacts.epochs(job.id):
            if epoch == job.epoch and job.state not in (State.SUCCEEDED, State.CANCELLED):
                continue
            for path in artifacts.attempt_dir(job.id, epoch).glob("checkpoints/*"):
                if path.name.startswith((".tmp-", "resume-")) and (epoch, path.name) not in listed and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                    log.info("%s of attempt %d of job %s is in no list; it was deleted", path.name, epoch, job.id)

    def _sweep_rollouts(self, job: JobRecord) -> None:
        """Of a step kept by several attempts the latest attempt's counts."""
        artifacts = self._ledger.artifacts
        kept = {(step, epoch) for epoch in artifacts.epochs(job.id) for step in artifacts.rollout_steps(job.id, epoch)}
        newest = sorted(kept, reverse=True)[: job.spec.method.grpo.telemetry.rollouts_keep]
        for step, epoch in kept.difference(newest):
            if epoch < job.epoch:
                artifacts.rollouts_path(job.id, epoch, step).unlink(missing_ok=True)

    def _due(self, job: JobRecord) -> list[CheckpointRecord]:
        published, resume = self._ledger.stored_checkpoints(job.id)
        loose = [record for record in published if not record.pinned]
        current = [record for record in loose if not record.superseded]
        due = current[job.spec.method.grpo.checkpoints.keep :]
        reached = max((record.step for record in current), default=0)
        due += [record for record in loose if record.superseded and (job.is_terminal or record.step <= reached)]
        if job.state in (State.SUCCEEDED, State.CANCELLED):
            due += resume
        elif any(record.epoch == job.epoch for record in resume):
            due += [record for record in resume if record.epoch < job.epoch]
        return due
