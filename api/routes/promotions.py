"""…/checkpoints/{id}/pin and /promote: what retention leaves alone, and what is fit to be used."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from api.auth import requires
from api.deps import BodyDep, CallerDep, Services, ServicesDep
from api.openapi import json_request
from api.present import answer, checkpoint_view
from api.routes.checkpoints import CheckpointId, find_checkpoint, verify
from api.routes.jobs import JobId
from grpo_engine.contract.checkpoint_view import Checkpoint, Gates, Promote
from grpo_engine.contract.error import Conflict
from grpo_engine.contract.intake import validate
from jobs.ledger.records import CheckpointRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/checkpoints/{checkpoint_id}", tags=["checkpoints"])


class GateFailed(Conflict):
    """The checkpoint does not meet a gate."""

    code = "gate_failed"


@router.post("/pin", response_model=Checkpoint)
@requires("control")
def pin(job_id: JobId, checkpoint_id: CheckpointId, services: ServicesDep, caller: CallerDep) -> Response:
    """Keep the checkpoint whatever `checkpoints.keep` says."""
    record = find_checkpoint(services, job_id, checkpoint_id)
    return _shown(services, services.ledger.pin(record.id, is_pinned=True, actor=caller.name))


@router.delete("/pin", response_model=Checkpoint)
@requires("control")
def unpin(job_id: JobId, checkpoint_id: CheckpointId, services: ServicesDep, caller: CallerDep) -> Response:
    """Leave the checkpoint to retention again. 409 while it is promoted."""
    record = find_checkpoint(services, job_id, checkpoint_id)
    return _shown(services, services.ledger.pin(record.id, is_pinned=False, actor=caller.name))


@router.post("/promote", response_model=Checkpoint, openapi_extra=json_request(Promote))
@requires("control")
def promote(job_id: JobId, checkpoint_id: CheckpointId, body: BodyDep, services: ServicesDep, caller: CallerDep) -> Response:
    """Promote the checkpoint if it passes every gate and every file is as written; it is pinned from then on. 409 `gate_failed`
    names the reading and the bound, 409 `checkpoint_damaged` the file."""
    wanted = validate(Promote, body)
    record = find_checkpoint(services, job_id, checkpoint_id)
    _check(record, wanted.gates)
    verify(services, record)
    gates = wanted.gates.model_dump(exclude_none=True)
    return _shown(services, services.ledger.promote(record.id, gates=gates, note=wanted.note, actor=caller.name[:128]))


@router.delete("/promote", response_model=Checkpoint)
@requires("control")
def withdraw(job_id: JobId, checkpoint_id: CheckpointId, services: ServicesDep, caller: CallerDep) -> Response:
    """Withdraw the promotion; the checkpoint stays pinned."""
    record = find_checkpoint(services, job_id, checkpoint_id)
    return _shown(services, services.ledger.withdraw_promotion(record.id, actor=caller.name))


def _check(record: CheckpointRecord, gates: Gates) -> None:
    """Raises GateFailed for the first gate the checkpoint does not meet."""
    readings = {"ref_kl": record.ref_kl, "reward": record.reward, "beta": record.beta, "step": float(record.step)}
    for gate, bound in gates.model_dump(exclude_none=True).items():
        side, _, name = gate.partition("_")
        reading = readings[name]
        if reading is None:
            raise GateFailed(f"gate {gate} {bound:g}: the checkpoint has no reading of {name}; use another gate", param=f"gates.{gate}")
        if reading > bound if side == "max" else reading < bound:
            word = "above" if side == "max" else "below"
            raise GateFailed(f"gate {gate}: {name} is {reading:g}, {word} the bound {bound:g}", param=f"gates.{gate}")


def _shown(services: Services, record: CheckpointRecord) -> Response:
    return answer(checkpoint_view(record, services.ledger.promotions_of([record.id]).get(record.id)))
