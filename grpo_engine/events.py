"""The engine's voice: `events.jsonl`, one JSON object a line, numbered 1, 2, 3 ... without gaps.

A full disk never ends training: what cannot be written waits in memory and is written, in order and in whole lines,
as soon as there is room. Beyond the backlog's bound new events are dropped before they get a number, and counted.
A line is with the operating system when `emit` returns, and on the disk when `sync` has returned True.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

from grpo_engine.contract.event import ENGINE_EVENTS, EngineEvent, Level, Progress
from grpo_engine.outcome import fsync_directory

EVENTS_FILE = "events.jsonl"
MESSAGE_LIMIT = 4096


class EventLog:
    """Appends engine events to a file.

    Raises FileExistsError when the file already holds events: an attempt writes into a directory of its own.
    """

    def __init__(self, path: Path, epoch: int, *, backlog_bytes: int = 16 * 2**20) -> None:
        if path.exists() and path.stat().st_size > 0:
            raise FileExistsError(f"{path} already holds the events of an attempt; give every attempt a directory of its own")
        self.path = path
        self.epoch = epoch
        self.seq = 0
        self.num_dropped = 0
        """Events lost because the disk stayed full until the backlog was full too."""
        self.num_write_failures = 0
        self.progress = Progress()
        self._backlog = bytearray()
        self._backlog_bytes = backlog_bytes
        self._durable_bytes = 0
        self._is_doubtful = False
        """An fsync has failed since: what it was to write may be lost although a later one succeeds."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def is_gone(self) -> bool:
        """Whether the file that is written is no longer the one that is read: its directory was removed, or replaced."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True
        except OSError:
            return False  # a disk that does not answer; what cannot be written waits

    def emit(
        self, kind: str, message: str, *, step: int | None = None, level: Level = "info", data: dict[str, Any] | None = None
    ) -> EngineEvent | None:
        """Write one event. Returns it, or None when it had to be dropped."""
        assert kind in ENGINE_EVENTS, f"{kind} is not described in ENGINE_EVENTS"
        event = EngineEvent(
            epoch=self.epoch,
            seq=self.seq + 1,
            time=time.time(),
            type=kind,
            level=level,
            step=step,
            message=message[:MESSAGE_LIMIT],
            data=data or {},
        )
        self.progress = self.progress.after(event)
        line = event.to_line().encode() + b"\n"
        self.flush()
        if len(self._backlog) + len(line) > self._backlog_bytes:
            self.num_dropped += 1
            return None
        self.seq += 1
        self._backlog += line
        self.flush()
        return event

    def flush(self) -> bool:
        """Hand everything that waits to the operating system. Returns whether nothing waits any more."""
        while self._backlog:
            try:
                written = os.write(self._fd, self._backlog)
            except OSError:
                self.num_write_failures += 1
                return False
            del self._backlog[:written]
        return True

    def sync(self) -> bool:
        """Make every event so far durable. Returns False when the disk refuses; then some may be lost in a power cut."""
        is_flushed = self.flush()
        try:
            if self._is_doubtful:
                self._write_again()
            os.fsync(self._fd)
            if self._durable_bytes == 0:
                fsync_directory(self.path.parent)
        except OSError:
            self.num_write_failures += 1
            self._is_doubtful = True
            return False
        self._durable_bytes, self._is_doubtful = os.fstat(self._fd).st_size, False
        return is_flushed

    def _write_again(self) -> None:
        """Linux calls pages clean whose write-back failed, so that only writing them anew brings them to the disk."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            block = os.pread(fd, os.fstat(fd).st_size - self._durable_bytes, self._durable_bytes)
            if os.pwrite(fd, block, self._durable_bytes) != len(block):
                raise OSError(errno.ENOSPC, "the disk took only a part of the events", str(self.path))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Write what waits, make it durable, and close the file."""
        if self._fd < 0:
            return
        self.sync()
        os.close(self._fd)
        self._fd = -1
