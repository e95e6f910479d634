"""The Celery task: claim an attempt, run it to its verdict.

A message is a hint and may come twice, late or for nothing. What cannot be started here is left unclaimed, and the
dispatcher publishes it again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from celery import Celery

from grpo_engine.contract.command import Dispatch
from grpo_engine.contract.error import Unavailable
from grpo_engine.contract.event import Outcome, Progress
from jobs.artifacts import Artifacts
from jobs.live import Live
from jobs.notices import Notice
from jobs.otel import Otel
from jobs.queue import RUN_ATTEMPT
from jobs.settings import Settings, bare_environment
from jobs.traces import HEADER, TraceContext, job_span
from worker.attempt import Attempt
from worker.drain import DRAIN
from worker.engine import ENGINE_COMMAND
from worker.gpus import Assignment, Gpus, NoHealthyGpu
from worker.processes import CannotEnd
from worker.spans import AttemptSpans
from worker.supervisor import Supervisor, Timing
from worker.tail import progress_of
from worker.verdict import stopped, supervision_failed
from worker.wire import Wire

log = logging.getLogger(__name__)


class NotStarted(Exception):
    """The attempt cannot be started here and stays unclaimed, so that it is published again."""


def register(app: Celery, settings: Settings, worker_id: str, engine_command: Sequence[str] = ENGINE_COMMAND) -> None:
    """Put the task on the application of a worker process."""

    def run_attempt(task: Any, job_id: str, epoch: int) -> None:
        live = Live.connect(settings)
        try:
            carry_out(job_id, epoch, live, settings, worker_id, engine_command, trace=task.request.get(HEADER))
        finally:
            live.close()

    app.task(name=RUN_ATTEMPT, ignore_result=True, bind=True)(run_attempt)


def carry_out(
    job_id: str, epoch: int, live: Live, settings: Settings, worker_id: str, engine_command: Sequence[str] = ENGINE_COMMAND,
    *, trace: str | None = None,
) -> Outcome | None:  # fmt: skip
    """Claim and run one attempt; None when it is not this worker's to run. Raises NotStarted when it cannot run here yet.

    `trace`: the `traceparent` its message came with.
    """
    artifacts = Artifacts(settings.data_dir)
    attempt = Attempt(artifacts, job_id, epoch)
    if attempt.is_claimed:
        _drop_duplicate(attempt, live, worker_id, "is claimed already")
        return None
    wanted = live.get_wanted(job_id)
    if wanted is not None and wanted.epoch > epoch:
        log.warning("%s is superseded by attempt %s; message dropped", attempt, wanted.epoch)
        return None
    dispatch = read_dispatch(attempt, live, artifacts, settings)
    gpus = Gpus(settings.data_dir)
    try:
        assigned = gpus.assign(bare_environment(), dispatch.spec.method.grpo.resources, settings.rank_hosts)
    except NoHealthyGpu as error:
        raise NotStarted(f"{attempt} is left to another worker: {error}; release one with `python -m worker.gpus`") from error
    if not attempt.claim(worker_id):
        _drop_duplicate(attempt, live, worker_id, "was claimed at the same moment")
        return None
    wire = Wire(live, job_id, epoch, worker_id)
    wire.renew_lease()
    try:
        early = _stop_before_start("run" if wanted is None else wanted.wanted)
        if early is not None:
            return attempt.settle(early)
        attempt.write_dispatch(dispatch)
        with _sigterm_drains(), _traced(attempt, settings, dispatch, worker_id, trace) as spans:
            supervisor = Supervisor(
                attempt, wire, _timing(settings), DRAIN, environment=assigned.environment, command=engine_command, spans=spans
            )
            outcome = supervisor.run()
        _report_quarantine(attempt, live, worker_id, _judge(gpus, assigned, outcome), outcome.message)
        return outcome
    except BaseException as error:
        if isinstance(error, CannotEnd):
            _report_quarantine(attempt, live, worker_id, gpus.condemn(assigned.devices, str(error)), str(error))
        if attempt.outcome() is None:
            attempt.settle(supervision_failed(error, progress_of(attempt)))
        raise
    finally:
        wire.release_lease()


def _drop_duplicate(attempt: Attempt, live: Live, worker_id: str, how: str) -> None:
    """Say so, here and in the job's history; it is no reason to trouble a Redis that is away."""
    if attempt.is_withdrawn:
        log.info("%s was withdrawn before a worker had it; message dropped", attempt)
        return
    log.warning("duplicate_delivery: %s %s; message dropped", attempt, how)
    message = f"The message of attempt {attempt.epoch} came once more, and it {how}; dropped."
    _tell(Notice(type="attempt.duplicate_delivery", job_id=attempt.job_id, epoch=attempt.epoch, worker=worker_id, message=message), live)


def _judge(gpus: Gpus, assigned: Assignment, outcome: Outcome) -> list[str]:
    try:
        return gpus.judge(assigned.devices, outcome) if assigned.devices else []
    except OSError as error:
        log.error("what is known of %s could not be written down: %s", ", ".join(assigned.devices), error)
        return []


def _report_quarantine(attempt: Attempt, live: Live, worker_id: str, devices: Sequence[str], why: str) -> None:
    """Say that devices are given to no job any more, here and in the history of the job that showed it."""
    if not devices:
        return
    message = f"GPU {', '.join(devices)} is in quarantine: {why}"[:2000]
    log.error("%s: %s", attempt, message)
    data = {"host": socket.gethostname(), "devices": list(devices)}
    _tell(
        Notice(
            type="attempt.device_quarantined", job_id=attempt.job_id, epoch=attempt.epoch, worker=worker_id, message=message,
            level="error", data=data,
        ),
        live,
    )  # fmt: skip


def _tell(notice: Notice, live: Live) -> None:
    try:
        live.post_notice(notice.model_dump_json())
    except Unavailable as error:
        log.warning("the history of %s will not tell of %s: %s", notice.job_id, notice.type, error)


def read_dispatch(attempt: Attempt, live: Live, artifacts: Artifacts, settings: Settings) -> Dispatch:
    """What the dispatcher left in Redis, with absolute paths. Raises NotStarted or ValidationError."""
    text = live.get_dispatch(attempt.job_id, attempt.epoch)
    if text is None:
        raise NotStarted(f"Redis holds no dispatch of {attempt}; the dispatcher will put it back and publish again")
    job_dir = artifacts.job_dir(attempt.job_id)
    if not job_dir.is_dir():
        raise NotStarted(f"{job_dir} does not exist on this host; workers need the server's data directory (GRPO_DATA_DIR)")
    note = json.loads(text)
    paths = {
        name: str(_inside(job_dir, note[name], artifacts.jobs_dir))
        for name in ("training_file", "validation_file", "resume_from", "model_from", "reference_from")
        if note.get(name) is not None
    }
    model_dir = None if settings.model_dir is None else str(settings.model_dir)
    place = {"job_id": attempt.job_id, "epoch": attempt.epoch, "cache_dir": str(artifacts.cache_dir), "model_dir": model_dir,
             "remote_graders": settings.remote_graders(), "hosts": settings.ranks_over_hosts()}  # fmt: skip
    dispatch = Dispatch.model_validate_json(json.dumps({**note, **paths, **place}))
    has_ranks = dispatch.spec.method.grpo.resources.num_ranks > 1
    return dispatch if has_ranks else dispatch.model_copy(update={"hosts": None})


def _inside(job_dir: Path, relative: str, jobs_dir: Path) -> Path:
    path = (job_dir / relative).resolve()
    if not path.is_relative_to(jobs_dir.resolve()):
        raise NotStarted(f"the dispatch names {relative!r}, which is outside the job directories")
    return path


def _stop_before_start(wanted: str) -> Outcome | None:
    """The verdict on an attempt that somebody stopped before its engine began."""
    if wanted == "cancel":
        return stopped("cancel", "cancelled before the engine was started", Progress(), retryable=False)
    if wanted == "pause":
        return stopped("pause", "paused before the engine was started", Progress(), retryable=True)
    if wanted == "requeue" or DRAIN.is_set():
        return stopped("drain", "the worker left before the engine was started", Progress(), retryable=True)
    return None


def _timing(settings: Settings) -> Timing:
    return Timing(
        poll_s=settings.poll_s,
        heartbeat_s=settings.heartbeat_s,
        cancel_grace_s=settings.cancel_grace_s,
        drain_grace_s=settings.drain_grace_s,
    )


@contextmanager
def _traced(attempt: Attempt, settings: Settings, dispatch: Dispatch, worker_id: str, trace: str | None) -> Iterator[AttemptSpans | None]:
    """The attempt's span around its supervision; None when OpenTelemetry is off."""
    otel = Otel.open(settings, "grpo-worker", worker_id)
    if otel is None:
        yield None
        return
    parent = TraceContext.parse(trace if isinstance(trace, str) else None) or job_span(attempt.job_id, None)
    spans = AttemptSpans(otel, attempt.job_id, attempt.epoch, parent, worker=worker_id, model=dispatch.spec.model)
    try:
        yield spans
    except BaseException as error:
        spans.end(attempt.outcome(), error)
        raise
    spans.end(attempt.outcome())


@contextmanager
def _sigterm_drains() -> Iterator[None]:
    """While an engine runs, the first SIGTERM to this process means drain, the second ends it (and the engine) now."""

    def leave(signum: int, frame: FrameType | None) -> None:
        if DRAIN.is_set_here:
            raise SystemExit(128 + signum)
        DRAIN.set_here()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def default_worker_id() -> str:
    """Host name and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
