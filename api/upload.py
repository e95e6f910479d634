"""Receiving one file in a multipart form, written straight to the data directory as its bytes arrive."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import anyio
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from grpo_engine.contract.error import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

MAX_FIELD_BYTES = 4096
MAX_PARTS = 16


@dataclass
class Upload:
    """A received form. `path` is a temporary file the caller moves or removes."""

    path: Path
    filename: str = ""
    bytes: int = 0
    sha256: str = ""
    fields: dict[str, str] = field(default_factory=dict)


async def receive_upload(request: Request, directory: Path, limit: int) -> Upload:
    """Read the form's `file` part into a new file below `directory`, at most `limit` bytes.

    Raises InvalidRequest (422), UnsupportedMediaType (415) or PayloadTooLarge (413), leaving nothing behind.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise UnsupportedMediaType("send the file as multipart/form-data with the parts file and purpose", param="content-type")
    await run_in_threadpool(directory.mkdir, parents=True, exist_ok=True)
    receiver = _Receiver(directory / f".incoming-{secrets.token_hex(8)}", limit)
    is_whole = False
    try:
        parser = MultipartParser(options[b"boundary"], receiver.callbacks())  # type: ignore[arg-type]
        async for chunk in request.stream():
            await run_in_threadpool(parser.write, chunk)
        await run_in_threadpool(parser.finalize)
        upload = await run_in_threadpool(receiver.finish)
        is_whole = True
        return upload
    except FormParserError as error:
        raise InvalidRequest(f"the form is malformed: {error}; send multipart/form-data", param="file") from error
    finally:
        if not is_whole:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(receiver.discard)


class _Receiver:
    """The parser's callbacks."""

    def __init__(self, path: Path, limit: int) -> None:
        self._upload = Upload(path)
        self._limit = limit
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._parts = 0
        self._has_ended = False

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_body,
            "on_part_data": lambda data, start, end: self._data(data[start:end]),
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def finish(self) -> Upload:
        if not self._has_ended:
            raise InvalidRequest("the form ends before its closing boundary; send it again", param="file")
        if self._file is None:
            raise InvalidRequest("file is required; add a part named file with a filename", param="file")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._upload.sha256 = self._digest.hexdigest()
        return self._upload

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
        self._upload.path.unlink(missing_ok=True)

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts; send file and purpose", param="body")
        self._disposition, self._value = b"", bytearray()

    def _end_header(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = (bytearray(), bytearray())

    def _begin_body(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = _text(options.get(b"name", b""), "name")
        self._is_file = self._name == "file"
        if not self._is_file:
            return
        if self._file is not None:
            raise InvalidRequest("the form holds two files; send one a request", param="file")
        self._upload.filename = _text(options.get(b"filename", b""), "filename")
        descriptor = os.open(self._upload.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb")

    def _data(self, data: bytes) -> None:
        if self._is_file and self._file is not None:
            self._upload.bytes += len(data)
            if self._upload.bytes > self._limit:
                raise PayloadTooLarge(f"the file exceeds {self._limit} bytes; split it", param="file")
            self._digest.update(data)
            self._file.write(data)
        else:
            self._value += data
            if len(self._value) > MAX_FIELD_BYTES:
                raise PayloadTooLarge(f"{self._name} exceeds {MAX_FIELD_BYTES} bytes; shorten it", param=self._name)

    def _end_part(self) -> None:
        if not self._is_file:
            self._upload.fields[self._name] = _text(bytes(self._value), self._name)

    def _end(self) -> None:
        self._has_ended = True


def _text(raw: bytes, param: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{param} is not UTF-8; send UTF-8", param=param) from error
    if "\0" in text or len(text) > 1024:
        raise InvalidRequest(f"{param} holds a NUL character or is longer than 1024 characters; change it", param=param)
    return text
