"""/v1/fine_tuning/sweeps: several jobs from one base, accepted together, steered together, and set side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query
from starlette.responses import Response

from api.auth import Caller, requires
from api.deps import BodyDep, CallerDep, Services, ServicesDep
from api.frontier import best_of, frontier
from api.openapi import json_request
from api.present import answer, as_number, error_view, progress_view
from api.routes.compare import router as compare_router
from api.routes.jobs import owner
from api.sweeping import plan
from grpo_engine.contract.intake import validate
from grpo_engine.contract.study_view import FrontierPoint
from grpo_engine.contract.sweep import SweepSpec
from grpo_engine.contract.sweep_view import Sweep, SweepMember
from grpo_engine.contract.view import Page, Status
from jobs.ledger import CheckpointRecord, IdempotencyKey, JobRecord, MemberRecord, Request, SweepRecord, body_sha256

router = APIRouter(prefix="/v1/fine_tuning/sweeps", tags=["sweeps"])

SweepId = Annotated[str, Path(max_length=80)]


@router.post("", status_code=201, response_model=Sweep, openapi_extra=json_request(SweepSpec))
@requires("submit")
def create(
    body: BodyDep,
    services: ServicesDep,
    caller: CallerDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Create 2 to 20 jobs that differ in `variants` and share model, data, their order, seed and reference: all of them, or none
    when one cannot be accepted. The same Idempotency-Key with the same body answers with the first sweep."""
    key = None if idempotency_key is None else IdempotencyKey(owner(caller), idempotency_key, body_sha256({"sweep": body}))
    earlier = None if key is None else services.ledger.find_idempotent_sweep(key)
    if earlier is not None:
        return answer(_show(services, [earlier])[0], headers={"idempotency-replayed": "true"})
    wanted = validate(SweepSpec, body)
    record = services.ledger.create_sweep(body, plan(wanted, services), name=wanted.name, idempotency=key)
    return answer(_show(services, [record])[0], status=201, headers={"location": f"{router.prefix}/{record.id}"})


@router.get("", response_model=Page[Sweep])
@requires("read")
def list_sweeps(
    services: ServicesDep,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """A page of sweeps, newest first."""
    page = services.ledger.list_sweeps(after=after, limit=limit, order=order)
    shown = _show(services, page.data)
    ids = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    return answer(Page[Sweep](data=shown, has_more=page.has_more, **ids))


@router.get("/{sweep_id}", response_model=Sweep)
@requires("read")
def get(sweep_id: SweepId, services: ServicesDep) -> Response:
    """The sweep: where each member is, and the reward-KL frontier over all their checkpoints."""
    return answer(_show(services, [services.ledger.get_sweep(sweep_id)])[0])


@router.post("/{sweep_id}/cancel", response_model=Sweep)
@requires("control")
def cancel(sweep_id: SweepId, services: ServicesDep, caller: CallerDep) -> Response:
    """Cancel every member that has not ended. 409 when all have ended otherwise."""
    return _request(services, caller, sweep_id, "cancel")


@router.post("/{sweep_id}/pause", response_model=Sweep)
@requires("control")
def pause(sweep_id: SweepId, services: ServicesDep, caller: CallerDep) -> Response:
    """Pause every member that can be paused; the others stay as they are."""
    return _request(services, caller, sweep_id, "pause")


@router.post("/{sweep_id}/resume", response_model=Sweep)
@requires("control")
def resume(sweep_id: SweepId, services: ServicesDep, caller: CallerDep) -> Response:
    """Queue every paused member again; the others stay as they are."""
    return _request(services, caller, sweep_id, "resume")


def _request(services: Services, caller: Caller, sweep_id: str, wanted: Request) -> Response:
    return answer(_show(services, [services.ledger.request_sweep(sweep_id, wanted, actor=caller.name)])[0])


def _show(services: Services, records: Sequence[SweepRecord]) -> list[Sweep]:
    jobs, saved = services.ledger.member_jobs(records), services.ledger.member_checkpoints(records)
    return [_view(record, jobs, saved) for record in records]


def _view(record: SweepRecord, jobs: Mapping[str, JobRecord], saved: Mapping[str, Sequence[CheckpointRecord]]) -> Sweep:
    ids = [member.job_id for member in record.members]
    points = frontier([checkpoint for job_id in ids for checkpoint in saved[job_id]])
    status = status_of([jobs[job_id].status for job_id in ids])
    return Sweep(
        id=record.id,
        created_at=int(record.created_at),
        name=record.name,
        status=status,
        is_terminal=all(jobs[job_id].is_terminal for job_id in ids),
        spec=record.request["spec"],
        data=[_member(record.request["variants"][member.number - 1], member, jobs[member.job_id], points) for member in record.members],
        frontier=points,
        best=best_of(points),
        compare=f"{compare_router.prefix}?jobs={','.join(ids)}",
    )


def _member(variant: Mapping[str, Any], member: MemberRecord, job: JobRecord, points: Sequence[FrontierPoint]) -> SweepMember:
    return SweepMember(
        number=member.number,
        name=member.name,
        job_id=job.id,
        beta=variant.get("beta"),
        overrides=variant.get("overrides", {}),
        status=job.status,
        phase=job.phase,
        progress=progress_view(job),
        error=error_view(job),
        ref_kl=as_number(job.metrics.get(f"kl/ref/{job.spec.method.grpo.kl.estimator}/mean")),
        reward=as_number(job.metrics.get("reward/mean")),
        applied_beta=as_number(job.metrics.get("beta/applied")),
        best=best_of([point for point in points if point.job_id == job.id]),
    )


def status_of(statuses: Sequence[Status]) -> Status:
    """One word for all members."""
    for word in ("running", "validating_files", "queued", "paused"):
        if word in statuses:
            return word
    if all(status == "succeeded" for status in statuses):
        return "succeeded"
    return "failed" if "failed" in statuses else "cancelled"
