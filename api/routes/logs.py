"""…/logs: what the engine printed, kept after the job has ended."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import PlainTextResponse, Response

from api.auth import requires
from api.deps import ServicesDep
from api.download import open_file
from api.routes.jobs import JobId
from grpo_engine.contract.error import NotFound

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/logs", tags=["logs"])

_MAX_BYTES = 4 * 2**20


@router.get("", response_class=PlainTextResponse)
@requires("read")
def logs(
    job_id: JobId,
    services: ServicesDep,
    tail: Annotated[int, Query(ge=1, le=100_000)] = 1000,
    attempt: Annotated[int | None, Query(ge=1, le=2**31)] = None,
) -> Response:
    """The last lines of an attempt's engine log (the latest attempt's by default), at most 4 MiB. What is not UTF-8 is replaced."""
    job = services.ledger.get_job(job_id)
    epoch = attempt or job.epoch
    if epoch < 1 or epoch > job.epoch:
        raise NotFound(f"job {job_id} has {job.epoch} attempts; there is no log of attempt {epoch}", param="attempt")
    opened = open_file(services.artifacts.log_path(job_id, epoch), "engine.log")
    with opened.file as file:
        file.seek(max(0, opened.size - _MAX_BYTES))
        lines = file.read(_MAX_BYTES).decode("utf-8", "replace").splitlines(keepends=True)
    headers = {"x-attempt": str(epoch), "x-log-bytes": str(opened.size)}
    return PlainTextResponse("".join(lines[-tail:]), headers=headers)
