"""Reading what an attempt's engine has written into events.jsonl, while it still writes."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.contract.event import EngineEvent

_READ_BYTES = 8 * 2**20
_TAIL_BYTES = 2**20
"""Of the file's end, in which the newest event stands."""

log = logging.getLogger(__name__)


def read_lines(path: Path, after_offset: int, limit_bytes: int = _READ_BYTES) -> tuple[list[bytes], int]:
    """Complete lines after a byte offset, and the offset after the last of them. A missing file has no lines.

    A line still being written stays for the next call. One longer than `limit_bytes` is read whole.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(after_offset)
            block = stream.read(limit_bytes)
            while block and b"\n" not in block and (more := stream.read(limit_bytes)):
                block += more
    except FileNotFoundError:
        return [], after_offset
    end = block.rfind(b"\n") + 1
    return block[:end].split(b"\n")[:-1], after_offset + end


def read_events(path: Path, after_offset: int = 0) -> tuple[list[EngineEvent], int]:
    """Events after a byte offset, and the next offset; call again until the offset stands still.

    A damaged line is logged and left out; it shows as a gap in `seq`, which ingest records.
    """
    lines, offset = read_lines(path, after_offset)
    events: list[EngineEvent] = []
    for line in lines:
        try:
            events.append(EngineEvent.model_validate_json(line))
        except ValidationError as error:
            if line.strip():
                log.warning("%s holds a damaged line: %s: %.120r", path, error.errors(include_url=False)[0]["msg"], line)
    return events, offset


def last_seq(path: Path) -> int:
    """Number of the newest event in the file; 0 when there is none."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    lines, _ = read_lines(path, max(0, size - _TAIL_BYTES))
    for line in reversed(lines):
        try:
            return EngineEvent.model_validate_json(line).seq
        except ValidationError:
            continue  # damaged; the one before it counts, and ingest tells of the gap
    return 0
