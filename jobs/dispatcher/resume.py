"""Which checkpoint an attempt continues from: the newest the ledger has accepted whose every byte verifies."""

from __future__ import annotations

import hashlib
import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jobs.ledger import CheckpointRecord, JobRecord, Ledger

MANIFEST = "manifest.json"
INLINE_BYTES = 16 * 2**20
"""Up to this size a checkpoint is hashed on the spot; larger ones beside the loop."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Where an attempt begins."""

    step: int | None
    path: str | None
    """Relative to the job directory; None = from the start."""


class ResumeChooser:
    """Verifies checkpoints; a bad one is marked and the next older is tried."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verify")
        self._running: dict[str, Future[str | None]] = {}

    def choose(self, job: JobRecord) -> Choice | None:
        """The beginning of the next attempt; None while a checkpoint is still being verified: ask again."""
        for record in self._ledger.resume_candidates(job.id):
            directory = self._ledger.artifacts.checkpoint_dir(job.id, record.epoch, record.name)
            if not directory.is_dir():
                self._ledger.mark_checkpoint(record.id, is_deleted=True)
                continue
            if record.bytes <= INLINE_BYTES:
                problem = find_damage(directory, record)
            else:
                if record.id not in self._running:
                    self._running[record.id] = self._pool.submit(find_damage, directory, record)
                if not self._running[record.id].done():
                    return None
                problem = self._running.pop(record.id).result()
            if problem is None:
                return Choice(record.step, str(directory.relative_to(self._ledger.artifacts.job_dir(job.id))))
            log.warning("checkpoint %s of job %s is not used: %s", record.name, job.id, problem)
            self._ledger.mark_checkpoint(record.id, damaged=True)
        return Choice(None, None)

    def close(self) -> None:
        """Wait for a verification under way."""
        self._pool.shutdown(cancel_futures=True)


def find_damage(directory: Path, record: CheckpointRecord) -> str | None:
    """What is wrong with a checkpoint directory, in words; None when manifest and files are those the engine announced."""
    expected = {member["name"] for member in record.files} | {MANIFEST}
    try:
        present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()}
        if present != expected:
            return f"it holds {sorted(present ^ expected)[0]} too many or too few"
        for member in record.files:
            path = directory / member["name"]
            if path.is_symlink() or path.stat().st_size != member["bytes"]:
                return f"{path.name} does not have its size"
            with path.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != member["sha256"]:
                    return f"{path.name} does not have its sha256"
        manifest = json.loads((directory / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    announced = {"name": record.name, "step": record.step, "kind": record.kind, "files": record.files}
    said = {key: manifest.get(key) for key in announced} if isinstance(manifest, dict) else {}
    wrong = [key for key, value in announced.items() if said.get(key) != value]
    return f"its manifest has another {wrong[0]} than was announced" if wrong else None
