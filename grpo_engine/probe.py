"""`python -m grpo_engine.probe RUN_DIR`: what would the job described by `dispatch.json` cost, and what is its first step like?

Loads the job as its run would and does a step or two without an update (probe_steps.py). Writes `probe.json`
(contract/probe_view.py) and, last, `outcome.json`: a job that cannot run ends here with the reason and field it would fail with.
No checkpoint, no rollout and no weight is written. Left out: several ranks.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from grpo_engine.__main__ import DISPATCH_FILE, failure, leave, read_dispatch
from grpo_engine.contract.command import Dispatch
from grpo_engine.contract.event import EXIT_CONFIG, EngineEvent, Level, Outcome
from grpo_engine.contract.probe_view import Probe
from grpo_engine.events import EVENTS_FILE, EventLog
from grpo_engine.outcome import OUTCOME_FILE, exit_code, write_outcome

PROBE_FILE = "probe.json"
DEFAULT_SECONDS = 100.0


class RememberingLog(EventLog):
    """An event log that also keeps the latest data of each type."""

    def __init__(self, path: Path, epoch: int) -> None:
        super().__init__(path, epoch)
        self.facts: dict[str, dict[str, Any]] = {}

    def emit(
        self, kind: str, message: str, *, step: int | None = None, level: Level = "info", data: dict[str, Any] | None = None
    ) -> EngineEvent | None:
        """Write one event and remember its data."""
        self.facts[kind] = data or {}
        return super().emit(kind, message, step=step, level=level, data=data)


def main(argv: list[str] | None = None) -> int:
    """Probe the job in RUN_DIR and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m grpo_engine.probe", description="Try a GRPO job's first step without training.")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="time there is for it, from now on")
    parser.add_argument("run_dir", type=Path, help="directory that holds dispatch.json; nothing else may be in use there")
    options = parser.parse_args(argv)
    run_dir = options.run_dir.resolve()
    if not (run_dir / DISPATCH_FILE).is_file() or (run_dir / OUTCOME_FILE).exists() or (run_dir / EVENTS_FILE).exists():
        sys.stderr.write(f"grpo_engine.probe: {run_dir} must hold {DISPATCH_FILE} and be unused\n")
        return EXIT_CONFIG
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return run(run_dir, options.seconds)


def run(run_dir: Path, seconds: float = DEFAULT_SECONDS) -> int:
    """Probe, write what was found and the outcome, and return the exit code."""
    started, log = time.monotonic(), None
    try:
        dispatch = read_dispatch(run_dir / DISPATCH_FILE)
        log = RememberingLog(run_dir / EVENTS_FILE, dispatch.epoch)
        found = _probe(dispatch, run_dir, log, started, seconds)
        (run_dir / PROBE_FILE).write_text(found.model_dump_json(), encoding="utf-8")
        outcome = Outcome(status="succeeded", reason="completed", message="probed", retryable=False, last_step=0)
    except Exception as error:  # noqa: BLE001  the last stop: every failure becomes a verdict, and its traceback goes to the log
        traceback.print_exc()
        outcome = failure(error, log)
    if log is not None:
        log.close()
    write_outcome(run_dir, outcome)
    return exit_code(outcome)


def _probe(dispatch: Dispatch, run_dir: Path, log: RememberingLog, started: float, seconds: float) -> Probe:
    from grpo_engine.assemble import assemble  # torch takes seconds to load: a spec that is wrong is answered before
    from grpo_engine.probe_report import describe
    from grpo_engine.probe_steps import rehearse
    from grpo_engine.train import abort_if_told, gate

    with assemble(dispatch, run_dir, log) as learner:
        load_s = time.monotonic() - started
        rehearsal = rehearse(learner, started + seconds)
        gate(learner, rehearsal.first)
        abort_if_told(learner, rehearsal.first)
        return describe(learner, rehearsal, log.facts, load_s)


if __name__ == "__main__":
    leave(main())
