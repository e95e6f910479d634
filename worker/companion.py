"""`python -m worker.companion --host N`: this host's processes for jobs that run over several hosts.

A worker on the first host runs such a job; each of the others runs a companion, with the same data directory and the same settings.
It looks there for attempts that name several hosts, starts the engine's processes of this host, and ends what is left of them when
the attempt has its verdict. One attempt at a time. It knows no Redis: whatever is decided about a job is decided on the first host,
and a process here that misses those there ends by itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from jobs.settings import Settings, bare_environment
from worker import launch
from worker.engine import ENGINE_COMMAND

log = logging.getLogger(__name__)

LAST_WORDS_S = 10.0
"""How long processes here may take to end after the attempt has its verdict."""
TERM_S = 5.0


class Companion:
    """Serves one host's part. `number` is this host's, from 1; the worker's is 0."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._settings = settings
        self._number = number
        self._known: set[Path] = set()
        """Attempts that were served, are over, or run on one host."""
        self.is_leaving = False

    def serve(self) -> None:
        """Join one attempt after the other until told to leave."""
        while not self.is_leaving:
            run_dir = self._next()
            if run_dir is None:
                time.sleep(self._settings.poll_s)
            else:
                self._join(run_dir)

    def leave(self, signum: int, frame: FrameType | None) -> None:
        """End what runs, and return from `serve`."""
        self.is_leaving = True

    def _next(self) -> Path | None:
        for path in sorted(self._settings.data_dir.glob("jobs/*/attempts/*/dispatch.json")):
            run_dir = path.parent
            if run_dir in self._known:
                continue
            self._known.add(run_dir)
            if not (run_dir / "outcome.json").exists() and _names_hosts(path):
                return run_dir
        return None

    def _join(self, run_dir: Path) -> None:
        launcher = [sys.executable, "-I", "-S", launch.__file__, "--parent", str(os.getpid()), "--"]
        engine = [*ENGINE_COMMAND, str(run_dir), "--host", str(self._number), "--interface", self._settings.rank_interface]
        with (run_dir / f"host-{self._number}.log").open("ab") as output:
            process = subprocess.Popen(
                [*launcher, *engine], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=bare_environment()
            )
        log.info("joined %s", run_dir)
        deadline: float | None = None
        while process.poll() is None and not self.is_leaving and (deadline is None or time.monotonic() < deadline):
            time.sleep(self._settings.poll_s)
            if deadline is None and (run_dir / "outcome.json").exists():
                deadline = time.monotonic() + LAST_WORDS_S
        if process.poll() is None:
            process.terminate()  # the engine ends its processes, and they die with it
            try:
                process.wait(TERM_S)
            except subprocess.TimeoutExpired:
                process.kill()
        log.info("left %s: exit status %s", run_dir, process.wait())


def _names_hosts(path: Path) -> bool:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read and is passed over: %s", path, error)
        return False
    return isinstance(content, dict) and content.get("hosts") is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m worker.companion", description="Run this host's processes of jobs over several hosts.")
    parser.add_argument("--host", type=int, required=True, help="number of this host, from 1; the worker's is 0")
    options = parser.parse_args(arguments)
    settings = Settings.from_env()
    if not 1 <= options.host < settings.rank_hosts:
        sys.stderr.write(f"companion: --host must be from 1 to {settings.rank_hosts - 1}, as GRPO_RANK_HOSTS is {settings.rank_hosts}\n")
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    companion = Companion(settings, options.host)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, companion.leave)
    companion.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
