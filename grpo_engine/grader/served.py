"""How a process that grades talks to the one that started it: a JSON line in, a JSON line out, an end with its parent."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
from typing import Any, BinaryIO

from grpo_engine.grader.wire import encode

_PR_SET_PDEATHSIG = 1


def read_requests(requests: queue.SimpleQueue[bytes]) -> None:
    """Pass lines on; the end of input ends the process at once, whatever the main thread is doing."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def private_stdout() -> BinaryIO:
    """The answers' stream; descriptor 1 becomes standard error, so that nothing printed disturbs the answers."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return answers


def answer(answers: BinaryIO, message: dict[str, Any]) -> None:
    """Write one line, whole."""
    data = memoryview(encode(message))
    while data:
        data = data[answers.write(data) :]


def die_with_parent() -> None:
    """On Linux the kernel kills this process with its parent, even while it computes without letting other threads run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
