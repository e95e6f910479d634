"""/v1/fine_tuning/jobs: create, list, read, wait, stop and go on."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api import retries
from api.admission import Admission, admit
from api.auth import Caller, requires
from api.conditions import names_etag
from api.deps import BodyDep, CallerDep, Services, ServicesDep
from api.openapi import accepts_query, json_request
from api.present import answer, job_view, outcome_view
from grpo_engine.contract.error import IdempotencyMismatch, InvalidRequest, NotFound
from grpo_engine.contract.job import JobSpec
from grpo_engine.contract.view import Job, JobOutcome, Page
from jobs.ledger.lineage import LineageRecord
from jobs.ledger.records import IdempotencyKey, JobRecord
from jobs.ledger.spelling import body_sha256
from jobs.lifecycle import State, states_of_status

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["jobs"])

JobId = Annotated[str, Path(max_length=80)]
KeyText = Annotated[str, Path(min_length=1, max_length=255)]
Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
Action = Literal["cancel", "pause", "resume"]
_MAX_LABELS = 16
"""Labels a job can have, and so that can be asked for."""


class JobNotFinished(NotFound):
    """The outcome is asked for too early."""

    code = "job_not_finished"


@router.post("", status_code=201, response_model=Job, openapi_extra=json_request(JobSpec))
@requires("submit")
async def create(
    body: BodyDep,
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Create a job. The same Idempotency-Key with the same body answers with the first job."""
    if idempotency_key is not None:
        return await run_in_threadpool(_create_with_key, services, caller, idempotency_key, body)
    mark = await run_in_threadpool(_mark, services, caller, body, retries.is_resent(request))
    response, is_new = await run_in_threadpool(create_once, services, mark, partial(admit, body, services))
    if is_new and not await request.is_disconnected():
        response.background = BackgroundTask(retries.note_delivered, services.ledger.database, mark)
    return response


@router.put("/by-key/{key:path}", status_code=201, response_model=Job, openapi_extra=json_request(JobSpec))
@requires("submit")
def create_by_key(key: KeyText, body: BodyDep, services: ServicesDep, caller: CallerDep) -> Response:
    """Create the job of this key, or answer with it: a POST with an Idempotency-Key, as an address."""
    try:
        return _create_with_key(services, caller, key, body)
    except IdempotencyMismatch as error:
        raise IdempotencyMismatch(error.message.replace("Idempotency-Key", "key"), param="key") from error


@router.get("", response_model=Page[Job])
@requires("read")
@accepts_query("metadata[]")
def list_jobs(
    request: Request,
    services: ServicesDep,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    status: Status | None = None,
    created_after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> Response:
    """A page of jobs, newest first. `metadata[k]=v` keeps the jobs with that label, `created_after` those made after that second began."""
    page = services.ledger.list_jobs(
        after=after,
        limit=limit,
        order=order,
        states=None if status is None else states_of_status(status),
        metadata=_labels(request),
        created_after=created_after,
    )
    lines = services.ledger.lineages([job.id for job in page.data])
    shown = [_show(services, job, lines[job.id]) for job in page.data]
    ids = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    return answer(Page[Job](data=shown, has_more=page.has_more, **ids))


@router.get("/{job_id}", response_model=Job)
@requires("read")
async def get(
    job_id: JobId,
    services: ServicesDep,
    wait: Annotated[float, Query(ge=0, le=60)] = 0.0,
    if_none_match: Annotated[str | None, Header(max_length=2000)] = None,
) -> Response:
    """The job. With `wait`, answers when its state changes (or its ETag differs), at the latest after so many seconds."""
    deadline = time.monotonic() + wait
    first, response = await run_in_threadpool(_read, services, job_id)
    job = first
    while (left := deadline - time.monotonic()) > 0 and not job.is_terminal:
        if job.state != first.state or (if_none_match is not None and not names_etag(if_none_match, response.headers["etag"])):
            break
        await asyncio.sleep(min(services.limits.poll_s, left))
        job, response = await run_in_threadpool(_read, services, job_id)
    if if_none_match is not None and names_etag(if_none_match, response.headers["etag"]):
        return Response(status_code=304, headers={"etag": response.headers["etag"]})
    return response


@router.get("/{job_id}/outcome", response_model=JobOutcome)
@requires("read")
def outcome(job_id: JobId, services: ServicesDep) -> Response:
    """How the job ended; 404 `job_not_finished` until it has."""
    job = services.ledger.get_job(job_id)
    if not job.is_terminal:
        raise JobNotFinished(f"job {job_id} is {job.status}; ask again when it has ended")
    return answer(outcome_view(job, _fine_tuned_model(services, job)))


@router.post("/{job_id}/cancel", response_model=Job)
@requires("control")
def cancel(job_id: JobId, services: ServicesDep, caller: CallerDep) -> Response:
    """End the job without a further checkpoint. 409 when it has ended otherwise."""
    return _request(services, caller, job_id, "cancel")


@router.post("/{job_id}/pause", response_model=Job)
@requires("control")
def pause(job_id: JobId, services: ServicesDep, caller: CallerDep) -> Response:
    """Finish the step, checkpoint, and free the slot."""
    return _request(services, caller, job_id, "pause")


@router.post("/{job_id}/resume", response_model=Job)
@requires("control")
def resume(job_id: JobId, services: ServicesDep, caller: CallerDep) -> Response:
    """Queue a paused job again; it goes on from its checkpoint."""
    return _request(services, caller, job_id, "resume")


def _request(services: Services, caller: Caller, job_id: str, action: Action) -> Response:
    return answer(_show(services, services.ledger.request(job_id, action, actor=caller.name)))


def _mark(services: Services, caller: Caller, body: dict[str, Any], is_resent: bool) -> IdempotencyKey:
    earlier = retries.undelivered(services.ledger.database, owner(caller), body) if is_resent else None
    return earlier or retries.new_mark(owner(caller), body)


def _create_with_key(services: Services, caller: Caller, key: str, body: dict[str, Any]) -> Response:
    return create_once(services, IdempotencyKey(owner(caller), key, body_sha256(body)), partial(admit, body, services))[0]


def create_once(services: Services, key: IdempotencyKey | None, admitted: Callable[[], Admission]) -> tuple[Response, bool]:
    """The answer, and whether it is about a job made now. An earlier job is found before the body is checked again."""
    earlier = None if key is None else services.ledger.find_idempotent(key)
    if earlier is not None:
        return answer(_show(services, earlier), headers={"idempotency-replayed": "true"}), False
    admission = admitted()
    job = services.ledger.create_job(
        admission.spec,
        training_path=admission.training_path,
        validation_path=admission.validation_path,
        weights=admission.weights,
        idempotency=key,
    )
    shown = _show(services, job)
    return answer(shown, status=201, headers={"location": f"{router.prefix}/{job.id}", "etag": _etag(shown.model_dump_json())}), True


def _read(services: Services, job_id: str) -> tuple[JobRecord, Response]:
    job, line = services.ledger.job_with_lineage(job_id)
    shown = _show(services, job, line)
    text = shown.model_dump_json()
    return job, Response(text, headers={"etag": _etag(text)}, media_type="application/json")


def _show(services: Services, job: JobRecord, line: LineageRecord | None = None) -> Job:
    line = line or services.ledger.lineages([job.id])[job.id]
    return job_view(job, fine_tuned_model=_fine_tuned_model(services, job), place=services.places.place(job), line=line)


def _fine_tuned_model(services: Services, job: JobRecord) -> str | None:
    if job.state is not State.SUCCEEDED:
        return None
    published = services.ledger.checkpoints(job.id, limit=1).data
    return published[0].id if published else None


def _labels(request: Request) -> dict[str, str]:
    labels: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith("metadata["):
            labels[name.removeprefix("metadata[").removesuffix("]")] = value
            if len(labels) > _MAX_LABELS:
                raise InvalidRequest(f"more than {_MAX_LABELS} labels; a job has no more", param=name[:64])
    return labels


def _etag(shown: str) -> str:
    return f'"{hashlib.sha256(shown.encode()).hexdigest()[:32]}"'


def owner(caller: Caller) -> str:
    """Whose idempotency keys they are."""
    return caller.key_id or "local"
