"""Whether a file still holds what its manifest says. A digest is computed once for each version of a file."""

from __future__ import annotations

import hashlib
import os
import threading

from api.download import OpenFile

_MAX_REMEMBERED = 4096
_CHUNK = 1 << 20


class VerifiedFiles:
    """Remembers digests by device, inode, size and modification time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int, int, int, int], str] = {}

    def is_intact(self, opened: OpenFile, size: int, sha256: str) -> bool:
        """Whether the open file has this size and SHA-256. Leaves its position at the start."""
        if opened.size != size:
            return False
        found = os.fstat(opened.file.fileno())
        version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        with self._lock:
            digest = self._known.get(version)
        if digest is None:
            opened.file.seek(0)
            digest = _sha256(opened)
            with self._lock:
                while len(self._known) >= _MAX_REMEMBERED:
                    del self._known[next(iter(self._known))]
                self._known[version] = digest
        opened.file.seek(0)
        return digest == sha256


def _sha256(opened: OpenFile) -> str:
    digest = hashlib.sha256()
    while chunk := opened.file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
