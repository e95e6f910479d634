"""A probe from the asking side: leave an order for a worker of the job's queue, wait beside the event loop, take the answer.

Nothing is created. Whoever leaves ends the probe, and so does a server that dies: the worker sees that nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from api.served_queues import ServedQueues, unserved
from grpo_engine.contract.error import Conflict, GrpoError, NotImplementedYet, Unavailable
from grpo_engine.contract.job import JobSpec
from grpo_engine.contract.probe_view import Probe
from jobs.artifacts import Artifacts
from jobs.probes import AskerBoard, ProbeAnswer, ProbeOrder, ProbeState
from jobs.queue import Publisher, queue_of
from jobs.settings import Settings

_QUIET = {"x-should-retry": "false"}
_LATE_S = 10.0
"""How long after its time limit, and the grace its engine gets, a worker's answer is waited for."""
_AGAIN = ("worker_lost", "drain", "unavailable", "abandoned")
"""Ends that say nothing about the job: the same request may succeed."""


class NoWorker(Conflict):
    """No live worker serves the job's queue."""

    code = "no_worker"


class WorkerBusy(Conflict):
    """Every slot of the queue has work."""

    code = "worker_busy"


class ProbeTimeout(GrpoError):
    """The probe did not end in time."""

    status = 504
    code = "probe_timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=_QUIET)


class ProbeFailed(GrpoError):
    """The probe ended as the job would: `code` is the reason, `param` the field."""

    def __init__(self, answer: ProbeAnswer) -> None:
        self.code = str(answer.code)
        self.status = 503 if self.code in _AGAIN else 500 if self.code == "crash" else 422
        self.type = "invalid_request_error" if self.status == 422 else "server_error"
        super().__init__(answer.message, param=answer.param, headers={"Retry-After": "5"} if self.status == 503 else _QUIET)


class Gone(Exception):
    """The client left; nobody is told anything."""


class Probes:
    """Asks workers for probes."""

    def __init__(self, settings: Settings, artifacts: Artifacts, served: ServedQueues) -> None:
        self._settings = settings
        self._artifacts = artifacts
        self._served = served
        self._publisher = Publisher(settings)

    def close(self) -> None:
        """Close the connections to the broker."""
        self._publisher.close()

    async def ask(self, spec: JobSpec, paths: Mapping[str, Path | None], request: Request) -> Probe:
        """What a worker finds out about the job. `paths`: the files it names, by the dispatch's names for them.

        Raises Gone, NoWorker, WorkerBusy, ProbeTimeout, ProbeFailed, Unavailable, NotImplementedYet.
        """
        resources = spec.method.grpo.resources
        if resources.num_ranks > 1:
            words = f"a job of {resources.num_ranks} processes cannot be probed; leave probe out, or probe it with gpus 1 or cpu_ranks 1"
            raise NotImplementedYet(words, param="probe")
        queue, probe_id = queue_of(resources.gpus), f"ftprobe-{secrets.token_hex(16)}"
        board = AskerBoard(self._settings)
        try:
            await board.post(probe_id, self._order(spec, paths))
            try:
                await self._require_worker(queue)
                await run_in_threadpool(self._publisher.ask_probe, probe_id, queue)
                return _read(await self._wait(board, probe_id, queue, request))
            finally:
                with contextlib.suppress(Unavailable):  # then the marks run out by themselves
                    await board.withdraw(probe_id)
        finally:
            await board.aclose()

    def _order(self, spec: JobSpec, paths: Mapping[str, Path | None]) -> ProbeOrder:
        root = self._artifacts.data_dir
        named = {name: path.relative_to(root).as_posix() for name, path in paths.items() if path is not None}
        return ProbeOrder(json.loads(spec.model_dump_json()), named, self._settings.probe_timeout_s)

    async def _require_worker(self, queue: str) -> None:
        slots = await run_in_threadpool(self._served.slots)
        if slots is not None and slots.get(queue, 0) == 0:
            raise NoWorker(f"{unserved(queue)}; or leave probe out", param="probe")

    async def _wait(self, board: AskerBoard, probe_id: str, queue: str, request: Request) -> ProbeAnswer:
        started = time.monotonic()
        taken_at: float | None = None
        limit_s = self._settings.probe_timeout_s + self._settings.cancel_grace_s + _LATE_S
        while True:
            if await request.is_disconnected():
                raise Gone
            state, now = await board.look(probe_id), time.monotonic()
            if state.answer is not None:
                return state.answer
            if not state.is_waiting:
                taken_at = now if taken_at is None else taken_at
                _require_runner(state)
                if now - taken_at >= limit_s:
                    raise ProbeTimeout(f"the worker has not answered {limit_s:g} s after it took the probe; look at the worker's log")
            elif now - started >= self._settings.probe_wait_s and await board.withdraw(probe_id):
                await self._require_worker(queue)
                raise WorkerBusy(
                    f"no slot of {queue} became free within {self._settings.probe_wait_s:g} s: its workers are busy with jobs or other "
                    "probes; try again when one has ended, start another worker, or leave probe out",
                    param="probe",
                )
            await asyncio.sleep(min(self._settings.poll_s, 0.25))


def _require_runner(state: ProbeState) -> None:
    if not state.is_running:
        message = "the worker that had taken the probe is gone, or Redis was emptied; try again"
        raise ProbeFailed(ProbeAnswer(code="worker_lost", message=message))


def _read(answer: ProbeAnswer) -> Probe:
    if answer.code == "probe_timeout":
        raise ProbeTimeout(answer.message)
    if answer.code is not None:
        raise ProbeFailed(answer)
    try:
        return Probe.model_validate(answer.probe)
    except ValidationError:
        message = "the worker's answer cannot be read; run the same version of server and workers"
        raise ProbeFailed(ProbeAnswer(code="unavailable", message=message)) from None
