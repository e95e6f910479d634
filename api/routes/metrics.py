"""…/metrics: telemetry by step, thinned on request, as JSON, CSV or a stream; and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response, StreamingResponse

from api.auth import requires
from api.buckets import buckets_to_csv, rows_to_csv, series_json
from api.conditions import preferred
from api.deps import CallerDep, Services, ServicesDep
from api.openapi import produces
from api.present import answer, as_float, metric_row
from api.routes.jobs import JobId
from api.sse import EventStream
from api.streams import END, START, is_ahead, metric_frames, parse_position
from grpo_engine.contract.error import InvalidRequest, Unavailable
from grpo_engine.contract.nearest import nearest
from grpo_engine.contract.telemetry import DESCRIPTORS, is_known
from grpo_engine.contract.view import Integrity, MetricPage, SampledMetrics
from jobs.ledger import Sampled
from jobs.ledger.records import StepRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/metrics", tags=["metrics"])

Step = Annotated[int | None, Query(ge=0, le=2**53)]
_DIGITS = frozenset("-0123456789")
"""A JSON number begins with one of these, and nothing else does."""

_CSV = "text/csv"
_VARY = {"vary": "accept"}
Seconds = Annotated[float | None, Query(ge=0, le=2**53, allow_inf_nan=False)]


@router.get("", response_model=MetricPage | SampledMetrics, responses=produces("text/csv"))
@requires("read")
def metrics(
    job_id: JobId,
    request: Request,
    services: ServicesDep,
    names: Annotated[list[str] | None, Query(max_length=200)] = None,
    global_step_from: Step = None,
    global_step_to: Step = None,
    logged_at_from: Seconds = None,
    logged_at_to: Seconds = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    resolution: Annotated[int | None, Query(ge=1, le=10_000)] = None,
) -> Response:
    """Rows in step order, both ends of a range included; steps that a rewind superseded are gone. `names` may be repeated or hold
    commas. `resolution` answers with at most that many buckets a metric instead, each with first, last, min and max; all are of the
    same width in steps, a power of two. Rows and buckets come as CSV when the Accept header prefers `text/csv`, otherwise as JSON."""
    chosen = metric_names(names)
    _require_order("global_step", global_step_from, global_step_to)
    _require_order("logged_at", logged_at_from, logged_at_to)
    is_csv = preferred(",".join(request.headers.getlist("accept")), ("application/json", _CSV)) == _CSV
    if resolution is not None:
        found = services.ledger.sampled(
            job_id, chosen, global_step_from, global_step_to, time_from=logged_at_from, time_to=logged_at_to, resolution=resolution
        )
        return _csv(buckets_to_csv(found.buckets, chosen), has_more=False) if is_csv else _sampled(found, chosen, resolution)
    steps = (global_step_from, global_step_to)
    if chosen and not is_csv:
        texts = services.ledger.metric_texts(job_id, chosen, *steps, time_from=logged_at_from, time_to=logged_at_to, limit=limit + 1)
        if texts is not None:
            return _page(texts[:limit], chosen, len(texts) > limit)
    rows = services.ledger.metrics(job_id, chosen, *steps, time_from=logged_at_from, time_to=logged_at_to, limit=limit + 1)
    has_more, rows = len(rows) > limit, rows[:limit]
    if is_csv:
        return _csv(_lines(rows, chosen), has_more=has_more)
    shown = {"object": "list", "data": [metric_row(row) for row in rows], "has_more": has_more, "sampled": False}
    return JSONResponse(shown, headers=_VARY)


@router.get("/stream", response_class=Response, responses=produces("text/event-stream"))
@requires("read")
def stream(
    job_id: JobId, services: ServicesDep, caller: CallerDep, last_event_id: Annotated[str | None, Header(max_length=80)] = None
) -> Response:
    """Steps and rewinds as server-sent events from the first on, until the job has ended. `Last-Event-ID` goes on after that
    event without gap or repeat; 204 when it was the last, 422 for one the job has not reached."""
    job = services.ledger.get_job(job_id)
    if last_event_id == END:
        if job.is_terminal:
            return Response(status_code=204)
        raise InvalidRequest("the job has not ended; send the id of the last event you have", param="last-event-id")
    after = START if last_event_id is None else parse_position(last_event_id)
    if after is None:
        raise InvalidRequest("Last-Event-ID is no id of this stream; send one such as 1-42", param="last-event-id")
    if not job.is_terminal and is_ahead(services, job, after):
        raise InvalidRequest("the job has sent no such event yet; send the id of the last event you have, or none", param="last-event-id")
    return EventStream(metric_frames(services, job_id, after), services.slots, caller.key_id)


@router.get("/integrity", response_model=Integrity)
@requires("read")
def integrity(job_id: JobId, services: ServicesDep) -> Response:
    """Missing and re-measured steps, gaps in the event files, and how far the database is behind the stream."""
    found = services.ledger.integrity(job_id)
    shown = Integrity(
        last_step=found.last_step,
        num_steps=found.steps,
        missing_steps=found.missing,
        num_superseded=found.superseded,
        num_gaps=found.gaps,
        ingest_lag=_ingest_lag(services, job_id),
        is_complete=not found.missing and not found.gaps,
    )
    return answer(shown)


def metric_names(given: list[str] | None) -> list[str] | None:
    """Names repeated or with commas, each once; None when none are given. Raises InvalidRequest for one that is no metric."""
    if given is None:
        return None
    names = list(dict.fromkeys(name.strip() for part in given for name in part.split(",") if name.strip()))
    for name in names:
        if not is_known(name):
            near = nearest(name, DESCRIPTORS)
            remedy = f"did you mean {near!r}?" if near else "GET the metrics without names to see what there is"
            raise InvalidRequest(f"there is no metric {name[:128]!r}; {remedy}", param="names")
    return names


def _require_order(name: str, first: float | None, last: float | None) -> None:
    if first is not None and last is not None and first > last:
        raise InvalidRequest(f"{name}_from is above {name}_to, and nothing lies between; exchange them", param=f"{name}_from")


def _sampled(found: Sampled, chosen: list[str] | None, resolution: int) -> Response:
    """In the shape of `contract.view.SampledMetrics`."""
    data = series_json(found.buckets, chosen)
    text = f'{{"object":"list","data":{data},"has_more":false,"sampled":true,"resolution":{resolution}}}'
    return Response(text, media_type="application/json", headers=_VARY)


def _page(texts: Sequence[Sequence[Any]], chosen: list[str], has_more: bool) -> Response:
    """In the shape of `contract.view.MetricPage`, from the database's own text: a page of a thousand rows is read by machines, often."""
    keys = [json.dumps(name) + ":" for name in chosen]
    rows = []
    for step, epoch, seq, logged_at, *values in texts:
        metrics = ",".join(
            [
                key + value
                for key, value in zip(keys, values, strict=True)
                if value is not None and (value[0] in _DIGITS or as_float(from_json(value)) is not None)
            ]
        )
        rows.append(f'{{"step":{step},"epoch":{epoch},"seq":{seq},"logged_at":{int(logged_at)},"metrics":{{{metrics}}}}}')
    text = f'{{"object":"list","data":[{",".join(rows)}],"has_more":{str(has_more).lower()},"sampled":false}}'
    return Response(text, media_type="application/json", headers=_VARY)


def _lines(rows: list[StepRecord], chosen: list[str] | None) -> Iterable[str]:
    names = chosen if chosen is not None else sorted({name for row in rows for name in row.metrics})
    readings = (
        (row.step, row.epoch, int(row.time), {name: value for name, raw in row.metrics.items() if (value := as_float(raw)) is not None})
        for row in rows
    )
    return rows_to_csv(names, readings)


def _csv(lines: Iterable[str], *, has_more: bool) -> Response:
    headers = {"x-has-more": str(has_more).lower(), **_VARY}
    return StreamingResponse(lines, media_type=f"{_CSV}; charset=utf-8", headers=headers)


def _ingest_lag(services: Services, job_id: str) -> int | None:
    epoch, seq = services.ledger.last_ingested(job_id)
    try:
        return len(services.live.read_stream(job_id, f"{epoch}-{seq}", count=10_000))
    except Unavailable:
        return None
