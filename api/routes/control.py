"""…/control: change beta, the target KL or the learning rate while the job runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header
from pydantic import model_validator
from starlette.responses import Response

from api.auth import requires
from api.conditions import names_etag
from api.deps import BodyDep, CallerDep, ServicesDep
from api.openapi import json_request
from api.present import answer, as_number, command_view
from api.routes.jobs import JobId
from grpo_engine.contract.base import NonNegativeFloat, PositiveFloat, Strict, broken_rule
from grpo_engine.contract.beta import BetaConfig, DeadbandBeta, FixedBeta, PpoBeta, ScheduleBeta, ZieglerBeta, schedule_values
from grpo_engine.contract.error import InvalidRequest, PreconditionFailed, ReferenceNotLoaded
from grpo_engine.contract.intake import validate
from grpo_engine.contract.view import ControlCommand, ControlSettings
from jobs.ledger.records import CommandRecord, JobRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/control", tags=["control"])


class ControlChange(Strict):
    """What to change from the next step boundary on."""

    beta: NonNegativeFloat | None = None
    """The new base of the beta rule; under an adaptive rule the multiplier returns to 1."""
    target: PositiveFloat | None = None
    """Target KL of an adaptive rule, in its unit."""
    learning_rate: PositiveFloat | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> ControlChange:
        if self.beta is None and self.target is None and self.learning_rate is None:
            raise broken_rule("beta", "give at least one of beta, target and learning_rate")
        return self


@router.get("", response_model=ControlSettings)
@requires("read")
def get(job_id: JobId, services: ServicesDep) -> Response:
    """The settings as of the last completed step, and every change asked for. The ETag changes with each accepted change."""
    job = services.ledger.get_job(job_id)
    commands = services.ledger.commands(job_id)
    grpo = job.spec.method.grpo
    target = grpo.beta.target if isinstance(grpo.beta, DeadbandBeta | PpoBeta | ZieglerBeta) else None
    settings = ControlSettings(
        beta=as_number(job.metrics.get("beta/next", _first_beta(grpo.beta))),
        target=as_number(job.beta.get("target", target)),
        learning_rate=_learning_rate(grpo.optimizer.learning_rate, commands),
        commands=[command_view(command) for command in commands],
    )
    return answer(settings, headers={"etag": _etag(job)})


@router.patch("", status_code=202, response_model=ControlCommand, openapi_extra=json_request(ControlChange))
@requires("control")
def patch(
    job_id: JobId,
    body: BodyDep,
    services: ServicesDep,
    caller: CallerDep,
    if_match: Annotated[str | None, Header(max_length=200)] = None,
) -> Response:
    """Number the change and hand it to the engine; the event `control.applied` gives its `effective_step`."""
    job = services.ledger.get_job(job_id)
    version = None if if_match is None else _version(job, if_match)
    change = validate(ControlChange, body)
    _check(job, change)
    command = services.ledger.add_command(
        job_id,
        kind="set",
        beta=change.beta,
        target=change.target,
        learning_rate=change.learning_rate,
        actor=caller.name[:128],
        if_version=version,
    )
    return answer(command_view(command), status=202, headers={"etag": _etag(services.ledger.get_job(job_id))})


def _check(job: JobRecord, change: ControlChange) -> None:
    grpo = job.spec.method.grpo
    if change.beta is not None and change.beta > 0 and not grpo.loads_reference:
        raise ReferenceNotLoaded(
            "the job holds no reference, so beta stays 0; start a job with kl.monitor true or a positive beta", param="beta"
        )
    if isinstance(grpo.beta, DeadbandBeta | PpoBeta | ZieglerBeta):
        if change.beta == 0:
            raise InvalidRequest("an adaptive rule cannot leave beta 0; give a positive value", param="beta")
        if change.beta is not None and not grpo.beta.min <= change.beta <= grpo.beta.max:
            bounds = f"the bounds [{grpo.beta.min:g}, {grpo.beta.max:g}] of rule {grpo.beta.rule!r}"
            raise InvalidRequest(f"beta {change.beta:g} lies outside {bounds}; choose a value inside them", param="beta")
    elif change.target is not None:
        raise InvalidRequest(f"rule {grpo.beta.rule!r} has no target; change beta instead", param="target")


def _first_beta(beta: BetaConfig) -> float:
    """What the rule begins with."""
    if isinstance(beta, FixedBeta):
        return beta.value
    if isinstance(beta, ScheduleBeta):
        return schedule_values(beta.schedule)[0]
    if beta.value is not None:
        return beta.value
    assert beta.schedule is not None
    return schedule_values(beta.schedule)[0]


def _learning_rate(posted: float, commands: list[CommandRecord]) -> float:
    """The peak of the learning rate's schedule: as posted, or as the last applied change left it."""
    changes = [record.command.learning_rate for record in commands if record.status == "applied"]
    return next((rate for rate in reversed(changes) if rate is not None), posted)


def _etag(job: JobRecord) -> str:
    return f'"settings-{job.settings_version}"'


def _version(job: JobRecord, if_match: str) -> int:
    if not names_etag(if_match, _etag(job), is_strong=True):
        raise PreconditionFailed(
            "the settings changed since you read them; read them again and repeat the change",
            param="if-match",
            headers={"etag": _etag(job), "x-should-retry": "false"},
        )
    return job.settings_version
