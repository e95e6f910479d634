"""…/logs: what the engine printed, kept after the job has ended."""

from __future__ import annotations

from pathlib import Path
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
    """The last lines of an attempt's engine log (the latest attempt's by default), at most 4 MiB. What is not UTF-8 is replaced.

    A log that was shortened goes on where its older part, `engine.log.1`, ends. x-log-bytes: both together.
    """
    job = services.ledger.get_job(job_id)
    epoch = attempt or job.epoch
    if epoch < 1 or epoch > job.epoch:
        raise NotFound(f"job {job_id} has {job.epoch} attempts; there is no log of attempt {epoch}", param="attempt")
    path = services.artifacts.log_path(job_id, epoch)
    newer, size = _end_of(path, _MAX_BYTES)
    older, older_size = _end_of(path.with_name(path.name + ".1"), _MAX_BYTES - len(newer))
    if size + older_size == 0 and not path.exists():
        raise NotFound(f"attempt {epoch} of job {job_id} has printed nothing yet", param="attempt")
    lines = (older + newer).decode("utf-8", "replace").splitlines(keepends=True)
    headers = {"x-attempt": str(epoch), "x-log-bytes": str(size + older_size)}
    return PlainTextResponse("".join(lines[-tail:]), headers=headers)


def _end_of(path: Path, limit: int) -> tuple[bytes, int]:
    """At most so many last bytes of a file, and its size; nothing of one that is not there."""
    try:
        opened = open_file(path, path.name)
    except NotFound:
        return b"", 0
    with opened.file as file:
        file.seek(max(0, opened.size - limit))
        return file.read(limit), opened.size
