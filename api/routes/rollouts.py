"""…/rollouts: the completions of a step, with what each earned and where it left the reference."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from api.auth import requires
from api.deps import Services, ServicesDep
from api.present import answer
from api.routes.jobs import JobId
from grpo_engine.contract.error import NotFound
from grpo_engine.contract.rollout import RolloutPage
from jobs.rollouts import read_rollouts

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/rollouts", tags=["rollouts"])


class RolloutsNotKept(NotFound):
    """The step has no completions on disk."""

    code = "rollouts_not_kept"


@router.get("", response_model=RolloutPage)
@requires("read")
def rollouts(
    job_id: JobId,
    services: ServicesDep,
    step: Annotated[int | None, Query(ge=1, le=10_000_000)] = None,
    after: Annotated[int, Query(ge=-1, le=2**31)] = -1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Response:
    """Sampled completions of a step (the latest kept one by default) in order of `index`, from the attempt whose run of the step
    counts. Steps are kept as `telemetry.rollouts_every` and `rollouts_keep` say; 404 `rollouts_not_kept` for the others."""
    services.ledger.get_job(job_id)
    chosen, epoch = _latest(services, job_id) if step is None else (step, _epoch_of(services, job_id, step))
    try:
        found, total = read_rollouts(services.artifacts.rollouts_path(job_id, epoch, chosen), after=after, limit=limit)
    except FileNotFoundError:
        raise _not_kept(job_id, chosen) from None
    has_more = after + 1 + len(found) < total and bool(found)
    return answer(RolloutPage(step=chosen, attempt=epoch, num_completions=total, data=found, has_more=has_more))


def _epoch_of(services: Services, job_id: str, step: int) -> int:
    """The attempt whose run of this step is not superseded."""
    rows = services.ledger.metrics(job_id, (), step, step)
    if not rows:
        raise NotFound(f"job {job_id} has not completed step {step}", param="step")
    return rows[-1].epoch


def _latest(services: Services, job_id: str) -> tuple[int, int]:
    """The newest step that counts and has completions, and its attempt."""
    kept = {
        (step, epoch)
        for epoch in services.artifacts.epochs(job_id)
        for step in services.artifacts.rollout_steps(job_id, epoch)
    }  # fmt: skip
    for step, epoch in sorted(kept, reverse=True):
        rows = services.ledger.metrics(job_id, (), step, step)
        if rows and rows[-1].epoch == epoch:
            return step, epoch
    raise _not_kept(job_id, None)


def _not_kept(job_id: str, step: int | None) -> RolloutsNotKept:
    if step is None:
        remedy = "ask again when its first step is done, and see that telemetry.rollouts_every is not null"
        return RolloutsNotKept(f"job {job_id} has kept no completions; {remedy}", param="step")
    remedy = "leave step out for the latest that is; telemetry.rollouts_every and telemetry.rollouts_keep say which are"
    return RolloutsNotKept(f"the completions of step {step} are not kept; {remedy}", param="step")
