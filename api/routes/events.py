"""…/events: the job's history, as pages and as a stream."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from api.auth import requires
from api.deps import CallerDep, ServicesDep
from api.openapi import produces
from api.present import answer, event_view
from api.routes.jobs import JobId
from api.sse import EventStream
from api.streams import event_frames
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.view import JobEvent, Page

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/events", tags=["events"])


@router.get("", response_model=Page[JobEvent])
@requires("read")
def list_events(
    job_id: JobId,
    services: ServicesDep,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Life cycle and engine events, newest first; steps are in …/metrics."""
    number = None if after is None else services.ledger.event_number(after)
    page = services.ledger.events(job_id, after=number, limit=limit, order=order)
    shown = [event_view(event) for event in page.data]
    ids = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    return answer(Page[JobEvent](data=shown, has_more=page.has_more, **ids))


@router.get("/stream", response_class=Response, responses=produces("text/event-stream"))
@requires("read")
def stream(
    job_id: JobId, services: ServicesDep, caller: CallerDep, last_event_id: Annotated[str | None, Header(max_length=80)] = None
) -> Response:
    """The same as server-sent events, oldest first, until the job has ended. `Last-Event-ID` goes on after that event; 204 when
    the job has ended and nothing follows it; 422 for an id the job has not reached."""
    job = services.ledger.get_job(job_id)
    number = 0
    if last_event_id is not None:
        try:
            number = services.ledger.event_number(last_event_id)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="last-event-id") from error
    if job.is_terminal and number and not services.ledger.events(job_id, after=number, limit=1).data:
        return Response(status_code=204)
    newest = services.ledger.events(job_id, limit=1, order="desc").data
    if number > (newest[0].number if newest else 0):
        raise InvalidRequest("the job has no such event; send the id of the last event you have, or none", param="last-event-id")
    return EventStream(event_frames(services, job_id, number), services.slots, caller.key_id)
