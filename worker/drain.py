"""The word "finish the step, save, and leave", said by the main process and heard in the pool child.

One byte of shared memory made before the fork: setting it is safe inside a signal handler and needs neither lock nor
Redis.
"""

from __future__ import annotations

import mmap


class DrainFlag:
    """Set once, never cleared: a draining worker ends, and so does a pool child that was told to leave."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)
        self.is_set_here = False
        """Only this process was told."""

    def set(self) -> None:
        """Ask every supervisor of this worker to drain."""
        self._memory[0] = 1

    def set_here(self) -> None:
        """Ask this process alone."""
        self.is_set_here = True

    def is_set(self) -> bool:
        """Whether this process is on its way out."""
        return self.is_set_here or self._memory[0] == 1


DRAIN = DrainFlag()
"""Of this worker: made at import, before the pool forks, so that parent and children share it."""
