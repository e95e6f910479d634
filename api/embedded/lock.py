"""One embedded stack per data directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 10.0
"""How long a start waits for the remains of a stack whose main process was killed."""


class DataDirBusy(Exception):
    """Another stack uses this directory; the message says which and what to do."""


class DataDirLock:
    """`data_dir/lock`, held by an open file: it is free the moment its holders are gone, however they ended."""

    def __init__(self, data_dir: Path, url: str) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._path = data_dir / "lock"
        self._file = self._path.open("a+")
        try:
            self._acquire(time.monotonic() + PATIENCE_S)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "url": url}))
        self._file.flush()

    @property
    def descriptor(self) -> int:
        """For a child that must end before another stack may begin."""
        return self._file.fileno()

    def release(self) -> None:
        """Let go."""
        self._file.truncate(0)
        self._file.close()

    def _acquire(self, deadline: float) -> None:
        while not self._try():
            holder = self._holder()
            if psutil.pid_exists(holder.get("pid", -1)) or time.monotonic() > deadline:
                raise DataDirBusy(
                    f"another server (pid {holder.get('pid', 'unknown')}, {holder.get('url', 'address unknown')}) already uses "
                    f"{self._path.parent}; use that one, stop it, or give another directory with --data-dir"
                )
            time.sleep(0.1)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _holder(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text())
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}
