"""…/fork: go on from a checkpoint with other settings, as a new job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.responses import Response

from api.admission import Admission, admit
from api.auth import requires
from api.deps import BodyDep, CallerDep, ServicesDep
from api.forking import Fork, forked_spec, inherited_files
from api.openapi import json_request
from api.routes.jobs import JobId, create_once, owner
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import validate
from grpo_engine.contract.view import Job
from jobs.ledger.records import IdempotencyKey
from jobs.ledger.spelling import body_sha256

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/fork", tags=["jobs"])


@router.post("", status_code=201, response_model=Job, openapi_extra=json_request(Fork))
@requires("submit")
def fork(
    job_id: JobId,
    body: BodyDep,
    services: ServicesDep,
    caller: CallerDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """A new job from a checkpoint of this one (the newest unless named), with its resolved settings but for `overrides`. Its
    reference is the parent's, the root of the line, unless overridden. The same Idempotency-Key answers with the first fork."""
    job = services.ledger.get_job(job_id)
    wanted = validate(Fork, body)

    def admitted() -> Admission:
        with _named_in_overrides(wanted.overrides):
            return admit(forked_spec(services, job, wanted), services, inherited=inherited_files(services, job))

    key = None
    if idempotency_key is not None:
        key = IdempotencyKey(owner(caller), idempotency_key, body_sha256({"fork": job_id, "body": body}))
    return create_once(services, key, admitted)[0]


@contextmanager
def _named_in_overrides(overrides: dict[str, Any]) -> Iterator[None]:
    """A refusal of what an override brought names it there."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and error.param.partition(".")[0] in overrides:
            error.param = f"overrides.{error.param}"
        raise
