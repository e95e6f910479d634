"""…/guardrails: a dry run of detectors and guardrails over what a job has measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from api.auth import requires
from api.deps import BodyDep, Services, ServicesDep
from api.openapi import json_request
from api.present import answer, as_float
from api.routes.jobs import JobId
from grpo_engine.contract.base import Strict
from grpo_engine.contract.diagnostics import Guardrail
from grpo_engine.contract.intake import validate
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.contract.study_view import GuardrailReplay, ReplayedEvent
from grpo_engine.guardrail import replay
from jobs.ledger.records import JobRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/guardrails", tags=["guardrails"])

_CHUNK = 2000
"""Steps read from the database at a time."""


class ReplayRequest(Strict):
    """Rules to try; what is left out is the job's own."""

    diagnostics: dict[str, dict[str, Any]] | None = None
    """Detectors and the thresholds to change, for example `{"kl_out_of_control": {"kl": 0.05}}`."""
    guardrails: list[Guardrail] | None = None
    """Instead of the job's."""


@router.post("/replay", response_model=GuardrailReplay, openapi_extra=json_request(ReplayRequest))
@requires("submit")
def replay_rules(job_id: JobId, body: BodyDep, services: ServicesDep) -> Response:
    """What would have fired, cleared and acted, step by step. Changes nothing; the job may be running or over."""
    job = services.ledger.get_job(job_id)
    grpo = _rules(job, validate(ReplayRequest, body), body)
    rows = _Rows(services, job_id)
    story = [ReplayedEvent(step=told.step, kind=told.kind, detector=told.name, message=told.message) for told in replay(rows, grpo)]
    return answer(GuardrailReplay(job_id=job_id, num_steps=rows.count, last_step=rows.last, data=story))


def _rules(job: JobRecord, wanted: ReplayRequest, body: dict[str, Any]) -> GrpoConfig:
    """The job's settings with the wanted rules in their place. Raises InvalidRequest naming the field of the body."""
    grpo: dict[str, Any] = json.loads(job.spec_json)["method"]["grpo"]
    for name, changes in (wanted.diagnostics or {}).items():
        below = grpo["diagnostics"].get(name)
        grpo["diagnostics"][name] = {**below, **changes} if isinstance(below, dict) else changes
    if wanted.guardrails is not None:
        grpo["guardrails"] = body["guardrails"]
    return validate(GrpoConfig, grpo)


class _Rows:
    """(step, metrics) of the steps that count, read as they are needed."""

    def __init__(self, services: Services, job_id: str) -> None:
        self._services = services
        self._job_id = job_id
        self.count = 0
        self.last = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        while rows := self._services.ledger.metrics(self._job_id, step_from=self.last + 1, limit=_CHUNK):
            for row in rows:
                self.count, self.last = self.count + 1, row.step
                yield row.step, {name: value for name, raw in row.metrics.items() if (value := as_float(raw)) is not None}
