"""/v1/fine_tuning/compare: jobs side by side, by step or by KL, and what reward their checkpoints bought for how much KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from api.auth import requires
from api.deps import Services, ServicesDep
from api.frontier import frontier
from api.present import answer, as_number
from api.routes.metrics import metric_names
from grpo_engine.contract.error import InvalidRequest, NotFound
from grpo_engine.contract.study_view import ComparedJob, ComparedPoint, ComparedSeries, Comparison
from grpo_engine.contract.sweep import MAX_MEMBERS
from grpo_engine.contract.telemetry import DESCRIPTORS
from jobs.ledger.records import JobRecord, StepRecord

router = APIRouter(prefix="/v1/fine_tuning/compare", tags=["compare"])

Align = Literal["step", "kl"]
MAX_JOBS = MAX_MEMBERS
_ALWAYS = ("reward/mean", "beta/applied")
"""Compared when no names are given, beside each job's own KL."""


@router.get("", response_model=Comparison)
@requires("read")
def compare(
    services: ServicesDep,
    jobs: Annotated[list[str], Query(max_length=200)],
    names: Annotated[list[str] | None, Query(max_length=200)] = None,
    align: Align = "step",
    limit: Annotated[int, Query(ge=2, le=10_000)] = 500,
) -> Response:
    """Curves of up to 20 jobs, and the reward-KL frontier over their published checkpoints. `jobs` and `names` may be repeated or
    hold commas; without `names`: KL, reward and beta. `align=kl` puts KL to the reference, by each job's own estimator, on the x axis
    and leaves out steps that did not measure it."""
    chosen = metric_names(names)
    records = [_job(services, job_id) for job_id in _ids(jobs)]
    compared = [_curves(services, job, chosen, align, limit) for job in records]
    saved = [record for job in records for record in services.ledger.checkpoints(job.id, limit=1000, order="asc").data]
    is_sampled = any(len(series.points) < series.num_points for job in compared for series in job.series)
    return answer(Comparison(align=align, sampled=is_sampled, data=compared, frontier=frontier(saved)))


def _ids(given: Sequence[str]) -> list[str]:
    ids = list(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))
    if not 1 <= len(ids) <= MAX_JOBS:
        raise InvalidRequest(f"jobs names {len(ids)} jobs; give 1 to {MAX_JOBS}", param="jobs")
    return ids


def _job(services: Services, job_id: str) -> JobRecord:
    try:
        return services.ledger.get_job(job_id)
    except NotFound as error:
        raise NotFound(error.message, param="jobs") from error


def _curves(services: Services, job: JobRecord, chosen: list[str] | None, align: Align, limit: int) -> ComparedJob:
    kl_metric = f"kl/ref/{job.spec.method.grpo.kl.estimator}/mean"
    names = chosen if chosen is not None else [kl_metric, *_ALWAYS]
    rows = services.ledger.metrics(job.id, list(dict.fromkeys([*names, kl_metric])))
    return ComparedJob(
        job_id=job.id,
        status=job.status,
        model=job.spec.model,
        user_provided_suffix=job.spec.suffix,
        kl_metric=kl_metric,
        last_step=job.step,
        series=[_series(name, rows, kl_metric if align == "kl" else None, limit) for name in names],
    )


def _series(name: str, rows: Sequence[StepRecord], x_metric: str | None, limit: int) -> ComparedSeries:
    points: list[ComparedPoint] = []
    for row in rows:
        value = as_number(row.metrics.get(name))
        x = float(row.step) if x_metric is None else as_number(row.metrics.get(x_metric))
        if value is not None and isinstance(x, float):
            points.append(ComparedPoint(step=row.step, x=x, value=value))
    known = DESCRIPTORS.get(name)
    return ComparedSeries(name=name, unit=None if known is None else known.unit, num_points=len(points), points=_thin(points, limit))


def _thin(points: list[ComparedPoint], limit: int) -> list[ComparedPoint]:
    """At most `limit` of them, evenly by position, the first and the last included."""
    if len(points) <= limit:
        return points
    last = len(points) - 1
    return [points[round(number * last / (limit - 1))] for number in range(limit)]
