"""Fetch a checkpoint: every file checked against its SHA-256, and gone on with where an earlier try broke off."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx

from api.client.errors import ClientError, DownloadDamaged, ServerUnreachable
from api.client.sync import Grpo
from grpo_engine.contract.member import MEMBER_NAME
from grpo_engine.contract.view import Checkpoint, CheckpointFile, File


def choose(checkpoints: list[Checkpoint], wanted: str | None) -> Checkpoint:
    """The newest checkpoint, or the one with that id, name or step. Raises ClientError."""
    if not checkpoints:
        raise ClientError("the job has no published checkpoint yet; its spec's method.grpo.checkpoints.every says how often it publishes")
    if wanted is None:
        return max(checkpoints, key=lambda checkpoint: checkpoint.step_number)
    for checkpoint in checkpoints:
        if wanted in (checkpoint.id, checkpoint.name, str(checkpoint.step_number)):
            return checkpoint
    names = ", ".join(f"{checkpoint.id} ({checkpoint.name})" for checkpoint in checkpoints)
    raise ClientError(f"the job has no checkpoint {wanted!r}; it has {names}")


def download(client: Grpo, checkpoint: Checkpoint, folder: Path, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
    """Write the checkpoint's files into `folder` and return it. `on_bytes` hears of every piece.

    Raises DownloadDamaged when a file is not what the server listed, ServerUnreachable when the connection breaks: calling
    again goes on from there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.files:
        _fetch(client, checkpoint, file, folder, on_bytes)
    return folder


def fetch_file(client: Grpo, file_id: str, target: Path) -> File:
    """Write an uploaded file to `target`, whole or not at all. Raises ClientError when `target` is there already."""
    if target.exists():
        raise ClientError(f"{target} is there already; give another place with --to")
    found, part = client.file(file_id), target.with_name(f"{target.name}.part")
    out = part.open("xb")
    try:
        with out:
            for piece in client.read_file(file_id):
                out.write(piece)
        if part.stat().st_size != found.bytes:
            raise DownloadDamaged(f"{file_id} arrived with {part.stat().st_size} bytes instead of {found.bytes}; try again")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return found


def _fetch(client: Grpo, checkpoint: Checkpoint, file: CheckpointFile, folder: Path, on_bytes: Callable[[int], None]) -> None:
    if MEMBER_NAME.fullmatch(file.name) is None:
        raise DownloadDamaged(f"the server lists a file named {file.name!r}, which is no plain name")
    target, part = folder / file.name, folder / f"{file.name}.part"
    target.parent.mkdir(exist_ok=True)
    if target.exists() and _sha256(target) == file.sha256:
        on_bytes(file.bytes)
        return
    have = part.stat().st_size if part.exists() else 0
    if have > file.bytes:
        part.unlink()
        have = 0
    on_bytes(have)
    if have < file.bytes or file.bytes == 0:
        try:
            with part.open("ab") as out:
                for piece in client.read_checkpoint_file(checkpoint, file.name, start=have):
                    out.write(piece)
                    on_bytes(len(piece))
        except httpx.TransportError as error:
            raise ServerUnreachable(client.base_url, error) from error
    if _sha256(part) != file.sha256:
        part.unlink()
        raise DownloadDamaged(f"{file.name} arrived damaged and was thrown away; try again")
    part.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
