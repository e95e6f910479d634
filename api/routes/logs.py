"""…/logs: what the engine printed, kept after the job has ended; and as it is printed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import PlainTextResponse, Response

from api.auth import requires
from api.deps import CallerDep, ServicesDep
from api.log_tail import MAX_BYTES, end_of, is_ahead, log_frames, older_part, parse_place, read_on
from api.openapi import produces
from api.routes.jobs import JobId
from api.sse import EventStream
from grpo_engine.contract.error import InvalidRequest, NotFound

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/logs", tags=["logs"])


@router.get("", response_class=PlainTextResponse)
@requires("read")
def logs(
    job_id: JobId,
    services: ServicesDep,
    tail: Annotated[int, Query(ge=1, le=100_000)] = 1000,
    attempt: Annotated[int | None, Query(ge=1, le=2**31)] = None,
) -> Response:
    """The last lines of an attempt's engine log (the latest attempt's by default), at most 4 MiB. What is not UTF-8 is replaced.

    A log that was shortened goes on where its older part, `engine.log.1`, ends. x-log-bytes: both together.
    """
    job = services.ledger.get_job(job_id)
    epoch = attempt or job.epoch
    if epoch < 1 or epoch > job.epoch:
        raise NotFound(f"job {job_id} has {job.epoch} attempts; there is no log of attempt {epoch}", param="attempt")
    path = services.artifacts.log_path(job_id, epoch)
    newer, size = end_of(path, MAX_BYTES)
    older, older_size = end_of(older_part(path), MAX_BYTES - len(newer))
    if size + older_size == 0 and not path.exists():
        raise NotFound(f"attempt {epoch} of job {job_id} has printed nothing yet", param="attempt")
    lines = (older + newer).decode("utf-8", "replace").splitlines(keepends=True)
    headers = {"x-attempt": str(epoch), "x-log-bytes": str(size + older_size)}
    return PlainTextResponse("".join(lines[-tail:]), headers=headers)


@router.get("/stream", response_class=Response, responses=produces("text/event-stream"))
@requires("read")
def stream(
    job_id: JobId,
    services: ServicesDep,
    caller: CallerDep,
    tail: Annotated[int, Query(ge=0, le=100_000)] = 1000,
    last_event_id: Annotated[str | None, Header(max_length=80)] = None,
) -> Response:
    """The log as server-sent events while it is written, from the last `tail` lines of the latest attempt on, through every attempt
    that follows, until the job has ended. `Last-Event-ID` goes on after that event instead; 204 when the job has ended and nothing
    follows it, 422 for a place no log of the job has reached."""
    job = services.ledger.get_job(job_id)
    if last_event_id is None:
        return EventStream(log_frames(services, job_id, None, tail), services.slots, caller.key_id)
    place = parse_place(last_event_id)
    if place is None:
        raise InvalidRequest("Last-Event-ID is no id of this stream; send one such as 1-0-42", param="last-event-id")
    is_known = 1 <= place.attempt <= job.epoch
    path = services.artifacts.log_path(job_id, place.attempt if is_known else 1)
    if not is_known or is_ahead(path, place):
        raise InvalidRequest("the log has no such place; send the id of the last event you have, or none", param="last-event-id")
    if job.is_terminal and place.attempt == job.epoch and not read_on(path, place, is_last=True)[0]:
        return Response(status_code=204)
    return EventStream(log_frames(services, job_id, place, tail), services.slots, caller.key_id)
