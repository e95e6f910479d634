"""/v1/fine_tuning/jobs/validate: every check of a create, and on request a few rollouts on a worker. Creates nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.admission import Admission, admit
from api.advisories import warnings_about
from api.auth import requires
from api.deps import BodyDep, Services, ServicesDep
from api.openapi import json_request
from api.present import answer
from api.probing import Gone
from api.served_queues import unserved
from grpo_engine.contract.intake import named_as_written
from grpo_engine.contract.job import JobSpec
from grpo_engine.contract.probe_view import Probe
from grpo_engine.contract.view import JobWarning, Validated
from jobs.queue import queue_of

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"])

_PROBE = "Run a few rollouts of the job on a worker, without an update: takes up to probe_wait_s + probe_timeout_s."


@router.post("/validate", response_model=Validated, openapi_extra=json_request(JobSpec))
@requires("submit")
async def validate(
    body: BodyDep, request: Request, services: ServicesDep, probe: Annotated[bool, Query(description=_PROBE)] = False
) -> Response:
    """Every check of a create, and the job as it would run; creates nothing. With `probe`, also what its first step is like:
    seconds by phase, peak memory, KL, rewards. 409 `no_worker` or `worker_busy` when nobody can try it now, 504 `probe_timeout`;
    a job that would fail gets a 422 with the code and param it would fail with."""
    admission = await run_in_threadpool(admit, body, services)
    found: Probe | None = None
    if probe:
        try:
            with named_as_written(body):
                found = await services.probes.ask(admission.spec, _paths(admission), request)
        except Gone:
            return Response(status_code=408)
    shown = await run_in_threadpool(_view, services, admission, found)
    return answer(shown)


def _paths(admission: Admission) -> dict[str, Path | None]:
    """Files and checkpoints the job names, by the dispatch's names for them."""
    weights = {f"{source.role}_from": source.directory for source in admission.weights}
    return {"training_file": admission.training_path, "validation_file": admission.validation_path, **weights}


def _view(services: Services, admission: Admission, found: Probe | None) -> Validated:
    return Validated(
        resolved=admission.spec.model_dump(mode="json"),
        rows=admission.num_rows,
        disk_bytes_needed=admission.disk_bytes,
        warnings=[*warnings_about(admission.spec), *_nobody_serves(services, admission.spec)],
        probe=found,
    )


def _nobody_serves(services: Services, spec: JobSpec) -> list[JobWarning]:
    """A warning when the job would wait for a worker that is not there."""
    queue, slots = queue_of(spec.method.grpo.resources.gpus), services.served.slots()
    if slots is None or slots.get(queue, 0) > 0:
        return []
    return [JobWarning(code="no_worker", param="method.grpo.resources.gpus", message=unserved(queue))]
