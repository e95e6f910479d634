"""The data directory: uploads, job directories, attempts and their files. The only place that joins paths.

Ids come from outside: each is matched against its pattern, and the resolved path must lie where it should, so that no
id, name or planted link reaches another file. What is written here survives a power cut (fsync, rename, fsync).
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_engine.contract.error import InvalidRequest, NotFound
from grpo_engine.contract.event import Outcome
from grpo_engine.contract.member import MEMBER_NAME
from grpo_engine.contract.rollout import rollout_name, rollout_step

JOB_ID = re.compile(r"ftjob-[A-Za-z0-9_-]{1,64}")
FILE_ID = re.compile(r"file-[A-Za-z0-9_-]{1,64}")
CHECKPOINT_NAME = re.compile(r"(step|resume)-[0-9]{6,12}")
LEDGER_CLAIM = "ledger"
"""worker_id of a claim by which the ledger takes an unclaimed attempt away from every worker."""

log = logging.getLogger(__name__)


class Artifacts:
    """Paths below one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.jobs_dir = self.data_dir / "jobs"
        self.files_dir = self.data_dir / "files"
        self.cache_dir = self.data_dir / "cache"

    def prepare(self) -> None:
        """Create the directories."""
        for directory in (self.jobs_dir, self.files_dir, self.cache_dir):
            directory.mkdir(parents=True, exist_ok=True)

    # Where things are

    def job_dir(self, job_id: str) -> Path:
        """Directory of a job. Raises NotFound for an id of the wrong shape."""
        return self._below(self.jobs_dir, job_id, JOB_ID, "job")

    def attempt_dir(self, job_id: str, epoch: int) -> Path:
        """RUN_DIR of an attempt."""
        if epoch < 1:
            raise NotFound(f"attempt {epoch} of job {job_id} does not exist; attempts count from 1")
        return self.job_dir(job_id) / "attempts" / str(epoch)

    def events_path(self, job_id: str, epoch: int) -> Path:
        """The attempt's events.jsonl."""
        return self.attempt_dir(job_id, epoch) / "events.jsonl"

    def log_path(self, job_id: str, epoch: int) -> Path:
        """The attempt's engine.log."""
        return self.attempt_dir(job_id, epoch) / "engine.log"

    def checkpoint_dir(self, job_id: str, epoch: int, name: str) -> Path:
        """Directory of a checkpoint. Raises NotFound for a name of the wrong shape or a planted link."""
        return self._below(self.attempt_dir(job_id, epoch) / "checkpoints", name, CHECKPOINT_NAME, "checkpoint")

    def checkpoint_file(self, job_id: str, epoch: int, name: str, member: str) -> Path:
        """One file of a checkpoint. The caller has checked that the ledger lists it."""
        return self._below(self.checkpoint_dir(job_id, epoch, name), member, MEMBER_NAME, "checkpoint file")

    def rollouts_path(self, job_id: str, epoch: int, step: int) -> Path:
        """The completions kept of a step, whether or not they are there."""
        return self.attempt_dir(job_id, epoch) / "rollouts" / rollout_name(step)

    def rollout_steps(self, job_id: str, epoch: int) -> list[int]:
        """Steps of an attempt whose completions are kept, ascending."""
        try:
            names = [entry.name for entry in os.scandir(self.attempt_dir(job_id, epoch) / "rollouts")]
        except FileNotFoundError:
            return []
        return sorted(step for name in names if (step := rollout_step(name)) is not None)

    def file_dir(self, file_id: str) -> Path:
        """Directory of an upload: `content` and `meta.json`."""
        return self._below(self.files_dir, file_id, FILE_ID, "file")

    def file_content(self, file_id: str) -> Path:
        """The uploaded bytes."""
        return self.file_dir(file_id) / "content"

    @staticmethod
    def _below(parent: Path, name: str, pattern: re.Pattern[str], kind: str) -> Path:
        path = parent / name
        if pattern.fullmatch(name) is None or Path(os.path.realpath(path)) != Path(os.path.realpath(parent)) / name:
            raise NotFound(f"no {kind} has the id {name[:80]!r}; check it against the list")
        return path

    # Jobs

    def write_job_json(self, job_id: str, content: dict[str, Any]) -> Path:
        """Write job.json durably, the directory entries above it included."""
        directory = self.job_dir(job_id)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "job.json"
        write_atomic(path, json.dumps(content, sort_keys=True, allow_nan=False, ensure_ascii=False).encode())
        fsync_dir(self.jobs_dir)
        return path

    def read_job_json(self, job_id: str) -> dict[str, Any]:
        """What `write_job_json` wrote. Raises NotFound or ValueError."""
        path = self.job_dir(job_id) / "job.json"
        if not path.is_file():
            raise NotFound(f"job {job_id} has no job.json")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no object")
        return content

    def link_input(self, source: Path, job_id: str, role: str) -> Path:
        """Give the job its own name for an uploaded file: a hard link, or a copy across file systems.

        `role` is `training` or `validation`; deleting the upload later harms nobody. Returns the new path.
        """
        directory = self.job_dir(job_id) / "inputs"
        directory.mkdir(parents=True, exist_ok=True)
        suffix = source.suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,16}", source.suffix) else ".jsonl"
        target = directory / f"{role}{suffix}"
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise InvalidRequest(f"the {role} file is gone; upload it again", param=f"{role}_file") from None
        except OSError:
            shutil.copyfile(source, target)
            _fsync_file(target)
        fsync_dir(directory)
        fsync_dir(directory.parent)
        return target

    def remove_job_dir(self, job_id: str) -> None:
        """Remove a job's directory with everything in it."""
        directory = self.job_dir(job_id)
        if directory.exists():
            shutil.rmtree(directory)

    def job_ids(self) -> Iterator[str]:
        """Ids of the job directories present, sorted."""
        if self.jobs_dir.is_dir():
            for entry in sorted(os.scandir(self.jobs_dir), key=lambda entry: entry.name):
                if JOB_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield entry.name

    def epochs(self, job_id: str) -> list[int]:
        """Numbers of the attempts that have a directory, ascending."""
        directory = self.job_dir(job_id) / "attempts"
        if not directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in os.scandir(directory) if entry.name.isdecimal() and int(entry.name) >= 1)

    # Attempts

    def claim(self, job_id: str, epoch: int, worker_id: str, pid: int | None = None) -> bool:
        """Take the attempt; exactly one caller ever gets True. The claim appears with its content, or not at all."""
        directory = self.attempt_dir(job_id, epoch)
        directory.mkdir(parents=True, exist_ok=True)
        content = {"worker_id": worker_id, "pid": os.getpid() if pid is None else pid, "claimed_at": time.time()}
        temporary = directory / f".claim-{secrets.token_hex(8)}"
        _write_durable(temporary, json.dumps(content).encode())
        try:
            os.link(temporary, directory / "claim.json")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(directory)
        return True

    def claim_holder(self, job_id: str, epoch: int) -> dict[str, Any] | None:
        """Content of the claim; None when nobody claimed; `{}` when it cannot be read (claimed, by whom is unknown)."""
        try:
            text = (self.attempt_dir(job_id, epoch) / "claim.json").read_bytes()
        except FileNotFoundError:
            return None
        try:
            content = json.loads(text)
        except ValueError:
            log.warning("claim of job %s, attempt %d is damaged", job_id, epoch)
            return {}
        return content if isinstance(content, dict) else {}

    def outcome(self, job_id: str, epoch: int) -> Outcome | None:
        """The attempt's verdict; None when there is none. A damaged one counts as a crash."""
        try:
            text = (self.attempt_dir(job_id, epoch) / "outcome.json").read_bytes()
        except FileNotFoundError:
            return None
        try:
            return Outcome.model_validate_json(text)
        except ValidationError as error:
            message = f"outcome.json is damaged: {error.errors(include_url=False)[0]['msg']}"
            return Outcome(status="failed", reason="crash", message=message, retryable=True, last_step=0)

    def write_outcome(self, job_id: str, epoch: int, outcome: Outcome) -> bool:
        """For the supervisor, when the engine died without a verdict. False when one exists: the first one stands.

        A directory that vanished under the engine is made anew: a verdict brings the next attempt at once.
        """
        directory = self.attempt_dir(job_id, epoch)
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".outcome-{secrets.token_hex(8)}"
        _write_durable(temporary, outcome.model_dump_json().encode())
        try:
            os.link(temporary, directory / "outcome.json")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(directory)
        return True

    def free_bytes(self) -> int:
        """Free space for unprivileged writers where the data directory lies."""
        return shutil.disk_usage(self.data_dir).free


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a power cut, sees the old or the new content."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_durable(temporary, content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def fsync_dir(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_durable(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _fsync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
