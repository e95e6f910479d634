"""Checkpoints: directories that are complete or absent.

Written into a temporary directory beside the final one, every file fsynced, a manifest with sizes and SHA-256 last, then
renamed and the parent fsynced. Two kinds: `published` weights, which transformers loads as they are, and the rolling
`resume` state: fp32 weights, optimizer moments and a JSON file with everything else an exact continuation needs.
Tensors are safetensors only; nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_engine.contract.member import MEMBER_NAME
from grpo_engine.outcome import CheckpointDamaged, fsync_directory

MANIFEST_FILE = "manifest.json"
FORMAT = 1
Kind = Literal["published", "resume"]


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    """As in contract/member.py: a file of the directory, or of a folder in it (`adapter/adapter_config.json`)."""
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint directory must hold, and where it comes from."""

    kind: Kind
    step: int
    epoch: int
    job_id: str
    created_at: float
    files: tuple[FileEntry, ...]
    about: dict[str, Any]
    """Versions, thread count, reference sha256, and the readings at this step."""

    @property
    def name(self) -> str:
        """Directory name."""
        return checkpoint_name(self.kind, self.step)

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files)

    def to_json(self) -> dict[str, Any]:
        """As written to `manifest.json` and into the `checkpoint.saved` event."""
        return {
            "format": FORMAT,
            "name": self.name,
            "kind": self.kind,
            "step": self.step,
            "epoch": self.epoch,
            "job_id": self.job_id,
            "created_at": self.created_at,
            "bytes": self.num_bytes,
            "files": [vars(entry) for entry in self.files],
            **self.about,
        }


@dataclass
class ResumeState:
    """Everything an exact continuation needs. `state` is JSON: cursor, beta rule, RNG, detectors, commands."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    reference: dict[str, Tensor] = field(default_factory=dict)
    """Reference weights, only when they moved since the start (`reference.sync_every`)."""


def checkpoint_name(kind: Kind, step: int) -> str:
    """`step-000010` or `resume-000010`."""
    return f"{'step' if kind == 'published' else 'resume'}-{step:06d}"


def save(
    parent: Path,
    kind: Kind,
    step: int,
    write: Callable[[Path], None],
    *,
    epoch: int,
    job_id: str,
    about: Mapping[str, Any],
    expected_bytes: int = 0,
) -> Manifest:
    """Write one checkpoint atomically below `parent`.

    Raises OSError when the disk refuses; nothing partial is left behind. A directory of the same name is replaced.
    """
    if not parent.exists():
        parent.mkdir(parents=True, exist_ok=True)
        fsync_directory(parent.parent)
    free = shutil.disk_usage(parent).free
    if free < expected_bytes:
        raise OSError(errno.ENOSPC, f"{expected_bytes} bytes are needed and {free} are free", str(parent))
    final = parent / checkpoint_name(kind, step)
    temporary = parent / f".tmp-{final.name}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        write(temporary)
        files = tuple(_seal(temporary, name) for name in sorted(_members(temporary)))
        manifest = Manifest(kind, step, epoch, job_id, time.time(), files, dict(about))
        path = temporary / MANIFEST_FILE
        path.write_text(json.dumps(manifest.to_json(), indent=1, allow_nan=False), encoding="utf-8")
        _fsync_file(path)
        fsync_directory(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        fsync_directory(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return manifest


def verify(directory: Path) -> Manifest:
    """Check every file against the manifest. Raises CheckpointDamaged naming the first that is missing, changed or extra."""
    try:
        raw = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = tuple(FileEntry(entry["name"], entry["bytes"], entry["sha256"]) for entry in raw["files"])
        known = {"format", "name", "kind", "step", "epoch", "job_id", "created_at", "bytes", "files"}
        about = {key: value for key, value in raw.items() if key not in known}
        manifest = Manifest(raw["kind"], raw["step"], raw["epoch"], raw["job_id"], raw["created_at"], files, about)
        version = raw["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"checkpoint {directory} has no readable manifest ({error}); use an older one") from error
    if version != FORMAT:
        raise CheckpointDamaged(f"checkpoint {directory} has format {version}, this build reads {FORMAT}; use a matching build")
    for entry in files:
        path = directory / entry.name
        if MEMBER_NAME.fullmatch(entry.name) is None or not path.is_file():
            raise CheckpointDamaged(f"checkpoint {directory} lacks {entry.name}; use an older one")
        if path.stat().st_size != entry.bytes or _sha256(path) != entry.sha256:
            raise CheckpointDamaged(f"{path} is not what was written (size or SHA-256 differ); use an older checkpoint")
    extra = _members(directory) - {entry.name for entry in files} - {MANIFEST_FILE}
    if extra:
        raise CheckpointDamaged(f"checkpoint {directory} holds {sorted(extra)[0]}, which its manifest does not know; use an older one")
    return manifest


def write_resume(directory: Path, resume: ResumeState) -> None:
    """The files of a resume checkpoint."""
    save_file(_contiguous(resume.weights), directory / "weights.safetensors")
    save_file(_contiguous(resume.optimizer), directory / "optimizer.safetensors")
    if resume.reference:
        save_file(_contiguous(resume.reference), directory / "reference.safetensors")
    (directory / "state.json").write_text(json.dumps({"step": resume.step, **resume.state}), encoding="utf-8")


def read_resume(directory: Path) -> tuple[Manifest, ResumeState]:
    """Verify and load a resume checkpoint. Raises CheckpointDamaged."""
    manifest = verify(directory)
    if manifest.kind != "resume":
        raise CheckpointDamaged(f"{directory} holds published weights, not a resume state; name a resume-* directory")
    state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    reference = directory / "reference.safetensors"
    return manifest, ResumeState(
        step=state.pop("step"),
        weights=load_file(directory / "weights.safetensors"),
        optimizer=load_file(directory / "optimizer.safetensors"),
        state=state,
        reference=load_file(reference) if reference.exists() else {},
    )


def remove_partial(parent: Path) -> None:
    """Delete temporary directories that a killed write left behind."""
    for path in parent.glob(".tmp-*"):
        shutil.rmtree(path)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _members(directory: Path) -> set[str]:
    """Names of all files, those of folders with the folder's name."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()}


def _seal(directory: Path, name: str) -> FileEntry:
    path = directory / name
    _fsync_file(path)
    if path.parent != directory:
        fsync_directory(path.parent)
    return FileEntry(name, path.stat().st_size, _sha256(path))


def _fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
