"""One killable grader process, asked one line at a time with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import grpo_engine

START_LIMIT_S = 120.0
"""A process that is not ready by then is given up."""


class DeadlinePassed(Exception):
    """No answer in time; the process has been killed."""


class ProcessDied(Exception):
    """The process ended before it answered."""


class GraderProcess:
    """A spawned `grpo_engine.grader.child`, or another module that is served alike. Not thread-safe: one thread owns it."""

    def __init__(self, *, is_reproducible: bool = False, module: str = "grpo_engine.grader.child") -> None:
        """`is_reproducible` fixes the order in which its sets are iterated, which Python else draws anew in each process."""
        root = Path(grpo_engine.__file__).resolve().parent.parent
        prefix = ["env", "PYTHONHASHSEED=0"] if is_reproducible else []
        command = [*prefix, sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, close_fds=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._buffer = b""
        self.compiled: set[str] = set()
        """Names of the graders it holds."""
        self._exchange(b"", START_LIMIT_S)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, line: bytes, deadline_s: float) -> bytes:
        """The answer to one request. Raises DeadlinePassed or ProcessDied; the process is gone then."""
        return self._exchange(line, deadline_s)

    def terminate(self) -> None:
        """End the process; whoever asks it gets ProcessDied. May be called from another thread."""
        self._process.kill()

    def kill(self) -> None:
        """End the process and reap it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _exchange(self, line: bytes, limit_s: float) -> bytes:
        end = time.monotonic() + limit_s
        rest = memoryview(line)
        poll = select.poll()
        try:
            while True:
                answer, found, after = self._buffer.partition(b"\n")
                if found and not rest:
                    self._buffer = after
                    return answer
                poll.register(self._out, select.POLLIN)
                if rest:
                    poll.register(self._in, select.POLLOUT)
                elif line:
                    with contextlib.suppress(KeyError):
                        poll.unregister(self._in)
                remaining = end - time.monotonic()
                if remaining <= 0 or not (ready := poll.poll(remaining * 1000)):
                    raise DeadlinePassed(f"no answer within {limit_s:g} s")
                rest = self._move(ready, rest)
        except (BrokenPipeError, ProcessDied):
            self.kill()
            raise ProcessDied(f"the grader process ended with {self._process.returncode}") from None
        except DeadlinePassed:
            self.kill()
            raise

    def _move(self, ready: list[tuple[int, int]], rest: memoryview) -> memoryview:
        for descriptor, _ in ready:
            if descriptor == self._in:
                rest = rest[os.write(self._in, rest) :]
            else:
                data = os.read(self._out, 65536)
                if not data:
                    raise ProcessDied
                self._buffer += data
        return rest
