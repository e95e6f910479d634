"""The last stop before a child process: bind its life to its parent's, offer it to the OOM killer, become the program.

`python launch.py --parent PID [--oom-score-adj N] -- PROGRAM ARGUMENT...`

It runs between fork and exec so that no Python code runs in a forked copy of the parent. Standard library only.
PR_SET_PDEATHSIG survives exec and follows the thread that spawned this process, so callers spawn from their main thread.
What it knowingly leaves out: macOS has no parent-death signal; there the janitor is the only net.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 88


def main(arguments: list[str]) -> None:
    """Prepare this process and replace it with the program; returns never."""
    parser = argparse.ArgumentParser(prog="launch", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="pid of the process whose death ends this one")
    parser.add_argument("--oom-score-adj", type=int, default=0, help="added to the kernel's out-of-memory score, 0 to 1000")
    parser.add_argument("program", nargs="+", help="program and its arguments, after --")
    options = parser.parse_args(arguments)
    _die_with_parent(options.parent)
    if options.oom_score_adj:
        _offer_to_oom_killer(options.oom_score_adj)
    os.execv(options.program[0], options.program)


def _die_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        sys.exit(EXIT_PARENT_GONE)


def _offer_to_oom_killer(score: int) -> None:
    path = Path("/proc/self/oom_score_adj")
    if not path.exists():
        return
    try:
        path.write_text(str(score))
    except OSError as error:
        print(f"launch: oom_score_adj stays as it is: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
