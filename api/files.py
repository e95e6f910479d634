"""Uploads on their way into the data directory: checked line by line, moved, recorded; or gone without a trace."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from api.deps import Services
from api.upload import Upload
from grpo_engine.contract.error import InsufficientStorage, InvalidRequest
from grpo_engine.rows import BadData, scan_file
from jobs.artifacts import fsync_dir
from jobs.ledger.records import FileRecord
from jobs.ledger.spelling import new_id

PURPOSE = "fine-tune"
_TABLE_SUFFIXES = (".csv", ".tsv")


def require_space(services: Services) -> None:
    """Raises InsufficientStorage (507) when the disk is nearly full."""
    free, needed = services.artifacts.free_bytes(), services.settings.min_free_bytes
    if free < needed:
        raise InsufficientStorage(f"{free} bytes are free and {needed} must stay free; free some space", param="file")


def keep(services: Services, received: Upload) -> FileRecord:
    """Check and store a received form; its temporary file is gone afterwards. Raises InvalidRequest (BadData names the line)."""
    try:
        _check_form(received)
        rows = _count_rows(received)
        return _store(services, received, rows)
    finally:
        received.path.unlink(missing_ok=True)


def _check_form(received: Upload) -> None:
    fields = received.fields
    if fields.get("purpose") != PURPOSE:
        raise InvalidRequest(f"purpose must be {PURPOSE!r}; add a part named purpose with it", param="purpose")
    unknown = sorted(set(fields) - {"purpose"})
    if unknown:
        raise InvalidRequest(f"unknown part {unknown[0][:64]!r}; send file and purpose only", param=unknown[0][:64])
    if not received.filename:
        raise InvalidRequest("the file has no name; give the part a filename", param="file")


def _count_rows(received: Upload) -> int:
    try:
        return scan_file(received.path, filename=received.filename)
    except BadData as error:
        raise BadData(error.message, param="file") from error


def _store(services: Services, received: Upload, rows: int) -> FileRecord:
    file_id = new_id("file")
    directory = services.artifacts.file_dir(file_id)
    directory.mkdir()
    try:
        target = services.artifacts.file_content(file_id)
        os.rename(received.path, target)
        suffix = Path(received.filename).suffix.lower()
        if suffix in _TABLE_SUFFIXES:
            os.link(target, target.with_suffix(suffix))
        fsync_dir(directory)
        fsync_dir(directory.parent)
        return services.ledger.add_file(
            file_id, filename=received.filename, purpose=PURPOSE, num_bytes=received.bytes, sha256=received.sha256, rows=rows
        )
    except BaseException:
        shutil.rmtree(directory)
        raise


def training_path(services: Services, record: FileRecord) -> Path:
    """The content under a name that tells a table from JSON Lines."""
    content = services.artifacts.file_content(record.id)
    named = content.with_suffix(Path(record.filename).suffix.lower())
    return named if named.suffix in _TABLE_SUFFIXES and named.is_file() else content
