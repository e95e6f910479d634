"""`python -m grpo_engine RUN_DIR`: run one job, described by `dispatch.json` in the directory.

Writes `events.jsonl`, `checkpoints/` and, last, `outcome.json`. Exit codes are in contract/event.py; SIGTERM ends the
process at once, without a checkpoint. A directory is used for one attempt only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.contract.command import Dispatch
from grpo_engine.contract.error import GrpoError, InvalidRequest
from grpo_engine.contract.event import EXIT_CONFIG, Level, Outcome, Progress
from grpo_engine.contract.intake import resolve_spec, validate
from grpo_engine.contract.resources import Resources
from grpo_engine.events import EVENTS_FILE, EventLog
from grpo_engine.memory import describe, is_out_of_memory
from grpo_engine.outcome import OUTCOME_FILE, ConfigError, RunFailure, exit_code, write_outcome
from grpo_engine.rank_processes import LOST, Seat, add_seat_arguments, die_with, is_lost, leave_verdict, run_ranks, seat_of
from grpo_engine.silent_log import SilentLog

if TYPE_CHECKING:
    from grpo_engine.ranks import Ranks

DISPATCH_FILE = "dispatch.json"
PLACEHOLDER_FILE = "file-local"
"""Stands for `training_file` in a spec written by hand: the dispatch names the real file."""


def main(argv: list[str] | None = None) -> int:
    """Run the job in RUN_DIR and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m grpo_engine", description="Run one GRPO training job.")
    parser.add_argument("run_dir", type=Path, help="directory that holds dispatch.json")
    add_seat_arguments(parser)
    options = parser.parse_args(argv)
    run_dir, seat = options.run_dir.resolve(), seat_of(options)
    if seat is not None:
        die_with(options.parent)
    refusal = _refusal(run_dir, options.host) if seat is None else None
    if refusal is not None:
        sys.stderr.write(f"grpo_engine: {refusal}\n")
        return EXIT_CONFIG
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return run(run_dir, seat) if seat is not None or options.host == 0 else join_in(run_dir, options.host, options.interface)


def _refusal(run_dir: Path, host: int) -> str | None:
    if not run_dir.is_dir():
        return f"{run_dir} is not a directory"
    if not (run_dir / DISPATCH_FILE).is_file():
        return f"{run_dir} holds no {DISPATCH_FILE}; write one with the keys spec and training_file"
    if (run_dir / OUTCOME_FILE).exists():
        return f"{run_dir} already holds {OUTCOME_FILE}: this attempt is over; use a new directory, with resume_from to continue it"
    events = run_dir / EVENTS_FILE
    if host == 0 and events.exists() and events.stat().st_size > 0:
        return f"{run_dir} already holds the events of an attempt; use a new directory, with resume_from to continue it"
    return None


def run(run_dir: Path, seat: Seat | None = None) -> int:
    """Run the attempt, write its outcome, and return the exit code. `seat`: as one of several ranks, which only the first speaks for."""
    log: EventLog | None = None
    rank = 0
    try:
        dispatch = read_dispatch(run_dir / DISPATCH_FILE)
        resources = dispatch.spec.method.grpo.resources
        if resources.num_ranks > 1 and seat is None:
            return run_ranks(run_dir, resources.num_ranks, dispatch.hosts)
        ranks = None if seat is None else _join(resources, seat)
        rank = 0 if seat is None else seat.rank
        log = EventLog(run_dir / EVENTS_FILE, dispatch.epoch) if rank == 0 else SilentLog(dispatch.epoch)
        outcome = _train(dispatch, run_dir, log, ranks)
    except Exception as error:  # noqa: BLE001  the last stop: every failure becomes a verdict, and its traceback goes to the log
        traceback.print_exc()
        outcome = failure(error, log)
        if seat is not None and (seat.rank > 0 or outcome.reason == LOST):
            leave_verdict(run_dir, seat.rank, outcome)
            return exit_code(outcome)
    if rank > 0:
        return exit_code(outcome)
    log = log or EventLog(run_dir / EVENTS_FILE, _epoch_of(run_dir / DISPATCH_FILE))
    level: Level = "info" if outcome.status != "failed" else "error"
    data = {**outcome.model_dump(), "events_dropped": log.num_dropped, "event_write_failures": log.num_write_failures}
    log.emit("run.finished", f"{outcome.status}: {outcome.message}", step=outcome.last_step, level=level, data=data)
    log.close()
    write_outcome(run_dir, outcome)
    return exit_code(outcome)


def join_in(run_dir: Path, host: int, interface: str | None) -> int:
    """Run the ranks of another host than the first, of an attempt that is begun or about to be. Returns the exit code."""
    try:
        dispatch = read_dispatch(run_dir / DISPATCH_FILE)
        if dispatch.hosts is None:
            raise ConfigError(f"{DISPATCH_FILE} names no hosts: all ranks of this job run on the worker's")
        return run_ranks(run_dir, dispatch.spec.method.grpo.resources.num_ranks, dispatch.hosts, host, interface)
    except (GrpoError, RunFailure) as error:
        sys.stderr.write(f"grpo_engine: {error.message}\n")
        return EXIT_CONFIG


def _join(resources: Resources, seat: Seat) -> Ranks:
    from grpo_engine.ranks import join

    return join(resources, seat)


def _train(dispatch: Dispatch, run_dir: Path, log: EventLog, ranks: Ranks | None) -> Outcome:
    from grpo_engine.assemble import assemble  # torch takes seconds to load: a spec that is wrong is answered before
    from grpo_engine.keeper import Keeper
    from grpo_engine.ranks import ALONE
    from grpo_engine.train import train

    with assemble(dispatch, run_dir, log, ranks or ALONE) as learner:
        keeper = Keeper(run_dir, learner, log)
        if dispatch.resume_from is not None:
            keeper.inherit((run_dir / dispatch.resume_from).resolve())
        steps = train(learner, keeper, log)
        while True:
            try:
                next(steps)
            except StopIteration as finished:
                outcome: Outcome = finished.value
                return outcome


def read_dispatch(path: Path) -> Dispatch:
    """Read `dispatch.json`; its spec may be resolved already or raw as a client would post it. Raises InvalidRequest."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path.name} is not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("spec"), dict):
        raise InvalidRequest(f"{path.name} must be an object with the keys spec and training_file")
    spec = raw["spec"]
    for name in ("training_file", "validation_file"):
        if raw.get(name) is not None and spec.get(name) is None:
            spec = {**spec, name: PLACEHOLDER_FILE}
    return validate(Dispatch, {**raw, "spec": resolve_spec(spec).model_dump(mode="json")})


def _epoch_of(path: Path) -> int:
    """The epoch of a dispatch that is wrong elsewhere, so that its failure is filed under the right attempt; else 1."""
    try:
        epoch = json.loads(path.read_text(encoding="utf-8"))["epoch"]
    except (OSError, ValueError, KeyError, TypeError):
        return 1
    return epoch if isinstance(epoch, int) and epoch > 0 else 1


def failure(error: BaseException, log: EventLog | None) -> Outcome:
    """The verdict for an exception: what a person can mend is a config error, everything else may be tried again."""
    if is_lost(error):
        error = RunFailure(f"another rank did not answer: {error}")
        error.reason = LOST
    elif isinstance(error, GrpoError):
        error = ConfigError(error.message, param=error.param) if error.status < 500 else RunFailure(error.message, param=error.param)
    if isinstance(error, RunFailure):
        reason, message, is_retryable, param = error.reason, error.message, error.is_retryable, error.param
    else:
        is_memory, param, is_retryable = is_out_of_memory(error), None, True
        reason = "out_of_memory" if is_memory else "crash"
        message = f"{describe(error)} ({type(error).__name__}: {error})" if is_memory else f"{type(error).__name__}: {error}"
    progress = log.progress if log is not None else Progress()
    return Outcome(
        status="failed",
        reason=reason,
        message=message,
        retryable=is_retryable,
        last_step=progress.last_step,
        resume_checkpoint=progress.resume_checkpoint,
        param=param,
    )


def leave(code: int) -> None:
    """End the process at once: the verdict is on disk, and torch takes seconds to take itself apart."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
