"""An attempt's engine log from its end backwards, and on from any place in it while it is written.

A place counts bytes of `engine.log`. A log that grew too long was shortened: its newest part went to `engine.log.1`, and it begins
anew with a line that says how much was dropped. That number tells one beginning from the next, so that a place from before the
shortening is still found.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from api.deps import Services
from api.download import open_file
from api.sse import DONE, HEARTBEAT, frame
from grpo_engine.contract.error import NotFound

MAX_BYTES = 4 * 2**20
"""Most that a look at the end of a log gives."""
_CHUNK = 256 * 2**10
_SHORTENED = re.compile(rb"\[log shortened: ([0-9]{1,15}) bytes dropped, the last ([0-9]{1,15}) before this line are in ")


class Place(NamedTuple):
    """How far a reader is."""

    attempt: int
    dropped: int
    """What the log's first line says was dropped; 0 for a log that was never shortened."""
    offset: int
    """Bytes."""

    def __str__(self) -> str:
        return f"{self.attempt}-{self.dropped}-{self.offset}"


def parse_place(text: str) -> Place | None:
    """`<attempt>-<dropped>-<offset>`; None for anything else."""
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) <= 16 for part in parts):
        return None
    return Place(*(int(part) for part in parts))


def end_of(path: Path, limit: int) -> tuple[bytes, int]:
    """At most so many last bytes of a file, and its size; nothing of one that is not there."""
    try:
        opened = open_file(path, path.name)
    except NotFound:
        return b"", 0
    with opened.file as file:
        file.seek(max(0, opened.size - limit))
        return file.read(limit), opened.size


def older_part(path: Path) -> Path:
    """Where the newest part of a log went when it was shortened."""
    return path.with_name(path.name + ".1")


def begin(path: Path, attempt: int, tail: int) -> tuple[str, Place]:
    """Where the last `tail` lines of a log begin, and what of them lies in its older part."""
    head = _head(path)
    newer, size = end_of(path, MAX_BYTES)
    older, _ = end_of(older_part(path), MAX_BYTES - len(newer))
    shown = sum(len(line) for line in (older + newer).splitlines(keepends=True)[-tail:]) if tail else 0
    in_older = max(0, shown - len(newer))
    text, _ = _decoded(older[len(older) - in_older :], is_last=True)
    return text, Place(attempt, _dropped(head), size - min(shown, len(newer)))


def read_on(path: Path, place: Place, *, is_last: bool) -> tuple[str, Place]:
    """What follows a place, up to 256 KiB and what lies in the older part, and the place after it. `is_last`: nothing will be added,
    so a character that is cut off stays so."""
    try:
        opened = open_file(path, path.name)
    except NotFound:
        return "", place
    with opened.file as file:
        head, older = file.read(200), b""
        if _dropped(head) != place.dropped or opened.size < place.offset:
            if not head:
                return "", place  # between the two moments of shortening
            if (mark := _SHORTENED.match(head)) is not None:
                missed = int(mark[1]) + int(mark[2]) - place.offset
                older, _ = end_of(older_part(path), min(max(0, missed), MAX_BYTES))
            place = Place(place.attempt, _dropped(head), 0)
        file.seek(place.offset)
        chunk = file.read(_CHUNK)
    text, left = _decoded(older + chunk, is_last=is_last and len(chunk) < _CHUNK)
    return text, place._replace(offset=place.offset + len(chunk) - min(left, len(chunk)))


def is_ahead(path: Path, place: Place) -> bool:
    """Whether the log has never been so long, or was never shortened so."""
    _, size = end_of(path, 0)
    is_shortened = _SHORTENED.match(_head(path)) is not None
    return not is_shortened and (place.dropped > 0 or place.offset > size)


async def log_frames(services: Services, job_id: str, place: Place | None, tail: int) -> AsyncGenerator[bytes, None]:
    """What the job's engines print after `place`, or from the last `tail` lines of the latest attempt on, until the job has ended."""
    quiet_since = time.monotonic()
    yield HEARTBEAT
    while True:
        job = await run_in_threadpool(services.ledger.get_job, job_id)
        text, is_begun = "", place is not None
        if place is None and job.epoch:
            text, place = await run_in_threadpool(begin, services.artifacts.log_path(job_id, job.epoch), job.epoch, tail)
        elif place is not None:
            is_last = job.is_terminal or job.epoch > place.attempt
            text, place = await run_in_threadpool(read_on, services.artifacts.log_path(job_id, place.attempt), place, is_last=is_last)
        if place is not None and (text or not is_begun):
            quiet_since = time.monotonic()
            for piece in _frames(text, place):
                yield piece
            continue
        if place is not None and job.epoch > place.attempt:
            place = Place(place.attempt + 1, 0, 0)
            continue
        if job.is_terminal:
            yield DONE
            return
        if time.monotonic() - quiet_since >= services.limits.heartbeat_s:
            quiet_since = time.monotonic()
            yield HEARTBEAT
        await asyncio.sleep(services.limits.poll_s)


def _frames(text: str, place: Place) -> Iterator[bytes]:
    """Pieces that a slow reader takes in time; only the last says that all of it was sent."""
    for start in range(0, len(text), _CHUNK):
        event_id = str(place) if start + _CHUNK >= len(text) else None
        yield frame({"attempt": place.attempt, "text": text[start : start + _CHUNK]}, event="log", event_id=event_id)


def _head(path: Path) -> bytes:
    try:
        opened = open_file(path, path.name)
    except NotFound:
        return b""
    with opened.file as file:
        return file.read(200)


def _dropped(head: bytes) -> int:
    mark = _SHORTENED.match(head)
    return 0 if mark is None else int(mark[1])


def _decoded(data: bytes, *, is_last: bool) -> tuple[str, int]:
    """The text, and how many bytes of a character cut off at the end are not in it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, is_last)
    return text, len(decoder.getstate()[0])
