"""Sending files: one with a byte range, or many as an uncompressed tar that is made while it is sent.

Files are opened before the answer begins, without following links; a file deleted meanwhile is still sent whole.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from starlette.responses import Response, StreamingResponse

from grpo_engine.contract.error import GrpoError, NotFound

CHUNK = 1 << 18
_BYTES = re.compile(r"\s*bytes\s*(=|$)", re.IGNORECASE)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)


class RangeNotSatisfiable(GrpoError):
    """The Range header names no part of the file."""

    status = 416
    code = "range_not_satisfiable"
    type = "invalid_request_error"


@dataclass(frozen=True)
class OpenFile:
    """A regular file, open for reading, and what it is called in the download."""

    name: str
    file: BinaryIO
    size: int
    modified_at: int


def open_file(path: Path, name: str) -> OpenFile:
    """Open a regular file below a directory the server chose. Raises NotFound for links and anything not a plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotFound(f"the file {name!r} is not there any more") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise NotFound(f"{name!r} is not a plain file")
    return OpenFile(name, os.fdopen(descriptor, "rb"), found.st_size, int(found.st_mtime))


def file_response(opened: OpenFile, *, range_header: str | None, if_range: str | None, etag: str, media_type: str) -> Response:
    """200 with the whole file, or 206 with one range of bytes. A unit other than bytes is ignored (RFC 9110, 14.2).

    Raises RangeNotSatisfiable (416).
    """
    headers = {"accept-ranges": "bytes", "etag": etag, "content-disposition": f'attachment; filename="{_ascii(opened.name)}"'}
    if range_header is not None and _BYTES.match(range_header) is None:
        range_header = None
    if range_header is None or (if_range is not None and if_range != etag):
        headers["content-length"] = str(opened.size)
        return StreamingResponse(_read(opened, 0, opened.size), headers=headers, media_type=media_type)
    try:
        start, end = _parse_range(range_header, opened.size)
    except RangeNotSatisfiable:
        opened.file.close()
        raise
    headers["content-length"] = str(end - start)
    headers["content-range"] = f"bytes {start}-{end - 1}/{opened.size}"
    return StreamingResponse(_read(opened, start, end - start), status_code=206, headers=headers, media_type=media_type)


def tar_response(folder: str, files: Sequence[OpenFile], *, etag: str) -> Response:
    """All files below `folder/` as a tar stream of known length."""
    heads = [_tar_header(f"{folder}/{opened.name}", opened) for opened in files]
    length = sum(len(head) + _padded(opened.size) for head, opened in zip(heads, files, strict=True)) + 2 * tarfile.BLOCKSIZE
    headers = {"content-length": str(length), "etag": etag, "content-disposition": f'attachment; filename="{_ascii(folder)}.tar"'}
    return StreamingResponse(_tar(heads, files), headers=headers, media_type="application/x-tar")


def without_body(response: Response, files: Sequence[OpenFile]) -> Response:
    """The answer to a HEAD: the same status and headers; the files are not read."""
    for opened in files:
        opened.file.close()
    return Response(status_code=response.status_code, headers=dict(response.headers))


def _parse_range(header: str, size: int) -> tuple[int, int]:
    """Start and end (exclusive)."""
    refused = {"content-range": f"bytes */{size}"}
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        raise RangeNotSatisfiable("ask for one range a request, such as bytes=0-1023", param="range", headers=refused)
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise RangeNotSatisfiable(f"the file has {size} bytes; ask for a range inside it", param="range", headers=refused)
    return start, end


def _read(opened: OpenFile, start: int, count: int) -> Iterator[bytes]:
    with opened.file as file:
        file.seek(start)
        while count > 0:
            chunk = file.read(min(CHUNK, count))
            if not chunk:
                raise OSError(f"{opened.name} became shorter while it was sent")
            count -= len(chunk)
            yield chunk


def _tar(heads: Sequence[bytes], files: Sequence[OpenFile]) -> Iterator[bytes]:
    try:
        for head, opened in zip(heads, files, strict=True):
            yield head
            yield from _read(opened, 0, opened.size)
            yield b"\0" * (_padded(opened.size) - opened.size)
        yield b"\0" * (2 * tarfile.BLOCKSIZE)
    finally:
        for opened in files:
            opened.file.close()


def _tar_header(name: str, opened: OpenFile) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = opened.size, opened.modified_at, 0o644
    return info.tobuf(format=tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _ascii(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
