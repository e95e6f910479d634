"""The Celery task of a probe: try a job's first step in a scratch directory, answer, and leave nothing behind.

A probe takes a slot as an attempt does, so it never runs beside a job on the same slot. It ends early when nobody waits for it any
more, when its time is over, or when the worker leaves. Its engine is launched like an attempt's and dies with this process.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from celery import Celery

from grpo_engine.contract.command import Dispatch
from grpo_engine.contract.error import Unavailable
from grpo_engine.contract.event import Progress
from jobs.artifacts import Artifacts, write_atomic
from jobs.probes import PROBE_ID, ProbeAnswer, ProbeOrder, WorkerBoard
from jobs.queue import RUN_PROBE
from jobs.settings import Settings, bare_environment
from worker.drain import DRAIN
from worker.engine import Engine
from worker.probe_place import ProbePlace
from worker.verdict import oom_kills, verdict_on_exit

log = logging.getLogger(__name__)

PROBE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "grpo_engine.probe")
ENGINE_SHARE = 0.85
"""Of the time limit, that the engine may plan with; the rest is for a step that takes longer than the last one did."""
LAST_WORDS_S = 5.0
_PLACES = {
    "training_file": "the training file", "validation_file": "the validation file",
    "model_from": "the checkpoint of the model", "reference_from": "the checkpoint of the reference",
}  # fmt: skip


class NotHere(Exception):
    """The probe cannot be run on this host."""


def register_probe(app: Celery, settings: Settings, worker_id: str, command: Sequence[str] = PROBE_COMMAND) -> None:
    """Put the task on the application of a worker process."""

    def run_probe(probe_id: str) -> None:
        board = WorkerBoard(settings)
        try:
            carry_out_probe(probe_id, board, settings, worker_id, command)
        finally:
            board.close()

    app.task(name=RUN_PROBE, ignore_result=True)(run_probe)


def carry_out_probe(
    probe_id: str, board: WorkerBoard, settings: Settings, worker_id: str, command: Sequence[str] = PROBE_COMMAND
) -> ProbeAnswer | None:
    """Take the order, try it, answer. None when the order is gone: somebody else has it, or nobody waits for it."""
    if PROBE_ID.fullmatch(probe_id) is None:
        log.error("a message asked for the probe %.80r, which is no id of ours", probe_id)
        return None
    order = board.take(probe_id, worker_id)
    if order is None:
        log.info("%s was withdrawn or taken; message dropped", probe_id)
        return None
    place = ProbePlace(Artifacts(settings.data_dir), probe_id)
    answer = ProbeAnswer(code="crash", message="the worker could not carry out the probe; its log says why")
    try:
        place.prepare()
        write_dispatch(place, order, settings)
        with _sigterm_ends():
            answer = Watch(place, board, settings, worker_id, order.time_limit_s).run(command)
    except NotHere as error:
        answer = ProbeAnswer(code="unavailable", message=str(error))
    except SystemExit:
        answer = ProbeAnswer(code="drain", message="the worker was ended in the middle of the probe; try again")
        raise
    finally:
        place.remove()
        tell(board, probe_id, answer)
    return answer


def write_dispatch(place: ProbePlace, order: ProbeOrder, settings: Settings) -> None:
    """What the engine reads. Raises NotHere when a file is not on this host."""
    root = place.artifacts.data_dir.resolve()
    paths: dict[str, str] = {}
    for name, relative in order.paths.items():
        path = (root / relative).resolve()
        if name not in _PLACES or not path.is_relative_to(root):
            raise NotHere(f"the order names {relative!r} as {name}, which is not in the data directory")
        if not path.exists():
            raise NotHere(f"{_PLACES[name]} is not on the worker's host; workers need the server's data directory (GRPO_DATA_DIR)")
        paths[name] = str(path)
    model_dir = None if settings.model_dir is None else str(settings.model_dir)
    about = {"job_id": place.job_id, "epoch": place.epoch, "cache_dir": str(place.artifacts.cache_dir), "model_dir": model_dir}
    dispatch = Dispatch.model_validate_json(json.dumps({"spec": order.spec, **paths, **about}))
    write_atomic(place.path / "dispatch.json", dispatch.model_dump_json().encode())


class Watch:
    """Runs one probe's engine from the main thread, and ends it when there is a reason to."""

    def __init__(self, place: ProbePlace, board: WorkerBoard, settings: Settings, worker_id: str, limit_s: float) -> None:
        self._place = place
        self._board = board
        self._settings = settings
        self._worker_id = worker_id
        self._limit_s = limit_s
        self._started = time.monotonic()
        self._next_look = 0.0

    def run(self, command: Sequence[str]) -> ProbeAnswer:
        """Start, watch, and tell what came of it; no process of the probe is left afterwards."""
        kills_before = oom_kills()
        engine = Engine(self._place, bare_environment(), [*command, "--seconds", f"{self._limit_s * ENGINE_SHARE:g}"])
        early: ProbeAnswer | None = None
        try:
            while early is None and not engine.wait(self._settings.poll_s):
                early = self._reason_to_end()
                engine.cap_log()
        finally:
            engine.end(0.0 if early is not None else self._settings.cancel_grace_s)
        if early is not None:
            return early
        assert engine.returncode is not None, "an engine that has ended has an exit status"
        return self._read(engine.returncode, was_oom=oom_kills() > kills_before)

    def _reason_to_end(self) -> ProbeAnswer | None:
        waited = time.monotonic() - self._started
        if DRAIN.is_set():
            return ProbeAnswer(code="drain", message="the worker left in the middle of the probe; try again")
        if waited >= self._limit_s:
            return ProbeAnswer(code="probe_timeout", message=timeout_message(self._limit_s, self._place.activity()))
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + min(self._settings.heartbeat_s, self._settings.lease_ttl_s / 4, 1.0)
            try:
                is_wanted = self._board.renew(self._place.probe_id, self._worker_id)
            except Unavailable as error:  # whoever waits learns it too; the time limit ends this probe at the latest
                log.warning("%s: %s", self._place.probe_id, error)
            else:
                if not is_wanted:
                    return ProbeAnswer(code="abandoned", message="nobody waits for the answer")
        return None

    def _read(self, returncode: int, *, was_oom: bool) -> ProbeAnswer:
        outcome = self._place.outcome() or verdict_on_exit(returncode, Progress(), was_oom=was_oom)
        if outcome.status != "succeeded":
            log.warning(
                "%s: %s (%s); the last words of its log:\n%s", self._place.probe_id, outcome.message, outcome.reason, self._place.tail()
            )
            return ProbeAnswer(code=outcome.reason, message=outcome.message, param=outcome.param)
        found = json.loads((self._place.path / "probe.json").read_bytes())
        return ProbeAnswer(probe={**found, "worker": self._worker_id})


def timeout_message(limit_s: float, activity: str) -> str:
    """What is told when the time is over."""
    return (
        f"the probe was ended after {limit_s:g} s, while it was {activity}; lower method.grpo.sampling (max_completion_tokens, "
        "group_size, prompts_per_step), try again when a model was being fetched (what is there is kept), or raise GRPO_PROBE_TIMEOUT_S"
    )


def tell(board: WorkerBoard, probe_id: str, answer: ProbeAnswer) -> None:
    """Leave the answer; a Redis that is away for longer than a moment means that nobody hears it."""
    log.info("%s: %s", probe_id, answer.code or "answered")
    deadline = time.monotonic() + LAST_WORDS_S
    while True:
        try:
            return board.finish(probe_id, answer)
        except Unavailable as error:
            if time.monotonic() >= deadline:
                log.warning("%s: the answer is lost: %s", probe_id, error)
                return None
            time.sleep(0.2)


def close_lost_probe(settings: Settings, probe_id: str) -> None:
    """For the main process, when the pool child that ran a probe died: end its engine, clean up, and say so."""
    if PROBE_ID.fullmatch(probe_id) is None:
        return
    ProbePlace(Artifacts(settings.data_dir), probe_id).close()
    board = WorkerBoard(settings)
    try:
        tell(board, probe_id, ProbeAnswer(code="worker_lost", message="the worker process that ran the probe died; try again"))
    finally:
        board.close()


@contextmanager
def _sigterm_ends() -> Iterator[None]:
    """While an engine runs, SIGTERM to this process ends it, and the engine with it."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
