"""…/checkpoints: published weights, listed, downloaded and deleted. Names come from the ledger, never from the request."""

from __future__ import annotations

import mimetypes
import shutil
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import Response

from api.auth import requires
from api.deps import Services, ServicesDep
from api.download import OpenFile, file_response, open_file, tar_response, without_body
from api.openapi import produces
from api.present import answer, checkpoint_view
from api.routes.jobs import JobId
from grpo_engine.contract.error import Conflict, NotFound
from grpo_engine.contract.view import Checkpoint, Deleted, Page
from jobs.ledger.records import CheckpointRecord

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/checkpoints", tags=["checkpoints"])

_CONTENT = produces("application/x-tar", "*/*") | produces("*/*", status=206)

CheckpointId = Annotated[str, Path(max_length=80)]


class CheckpointDamaged(Conflict):
    """The files on disk are not those that were written."""

    code = "checkpoint_damaged"


@router.get("", response_model=Page[Checkpoint])
@requires("read")
def list_checkpoints(
    job_id: JobId,
    services: ServicesDep,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> Response:
    """Published checkpoints, newest first."""
    page = services.ledger.checkpoints(job_id, after=after, limit=limit)
    promoted = services.ledger.promotions_of([record.id for record in page.data])
    shown = [checkpoint_view(record, promoted.get(record.id)) for record in page.data]
    ids = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    return answer(Page[Checkpoint](data=shown, has_more=page.has_more, **ids))


@router.get("/{checkpoint_id}", response_model=Checkpoint)
@requires("read")
def get(job_id: JobId, checkpoint_id: CheckpointId, services: ServicesDep) -> Response:
    """One checkpoint with its files."""
    record = find_checkpoint(services, job_id, checkpoint_id)
    return answer(checkpoint_view(record, services.ledger.promotions_of([record.id]).get(record.id)))


@router.head("/{checkpoint_id}/content", include_in_schema=False)
@router.get("/{checkpoint_id}/content", response_class=Response, responses=_CONTENT)
@requires("read")
def content(
    job_id: JobId,
    checkpoint_id: CheckpointId,
    request: Request,
    services: ServicesDep,
    file: Annotated[str | None, Query(max_length=256)] = None,
    range_header: Annotated[str | None, Header(alias="range", max_length=200)] = None,
    if_range: Annotated[str | None, Header(max_length=200)] = None,
) -> Response:
    """The whole checkpoint as an uncompressed tar of one folder, or with `file` one file of it, by range when asked. The files are
    compared with their SHA-256 first; 409 when they differ."""
    record = find_checkpoint(services, job_id, checkpoint_id)
    if file is None:
        with ExitStack() as stack:
            opened = [_open(services, record, member, stack) for member in record.files]
            stack.pop_all()
        whole = tar_response(f"{record.job_id}-{record.name}", opened, etag=f'"{record.id}"')
        return without_body(whole, opened) if request.method == "HEAD" else whole
    member = next((member for member in record.files if member["name"] == file), None)
    if member is None:
        names = ", ".join(member["name"] for member in record.files)
        raise NotFound(f"checkpoint {record.id} has no such file; it has {names}", param="file")
    with ExitStack() as stack:
        one = _open(services, record, member, stack)
        stack.pop_all()
    kind = mimetypes.guess_type(member["name"])[0] or "application/octet-stream"
    response = file_response(one, range_header=range_header, if_range=if_range, etag=f'"{member["sha256"]}"', media_type=kind)
    return without_body(response, [one]) if request.method == "HEAD" else response


@router.delete("/{checkpoint_id}", response_model=Deleted)
@requires("control")
def delete(job_id: JobId, checkpoint_id: CheckpointId, services: ServicesDep) -> Response:
    """Remove a published checkpoint for good; downloads under way still finish. 409 while it is pinned."""
    record = find_checkpoint(services, job_id, checkpoint_id)
    if record.pinned:
        raise Conflict(f"checkpoint {record.id} is pinned; DELETE its pin first (and its promotion, if it is promoted)")
    services.ledger.mark_checkpoint(record.id, is_deleted=True)
    directory = services.artifacts.checkpoint_dir(record.job_id, record.epoch, record.name)
    if directory.exists():
        shutil.rmtree(directory)
    return answer(Deleted(id=record.id, object="fine_tuning.job.checkpoint"))


def find_checkpoint(services: Services, job_id: str, checkpoint_id: str) -> CheckpointRecord:
    """A published checkpoint of this job. Raises NotFound."""
    record = services.ledger.get_checkpoint(checkpoint_id)
    if record.job_id != job_id or record.kind != "published":
        raise NotFound(f"job {job_id} has no checkpoint {checkpoint_id}; list its checkpoints")
    return record


def verify(services: Services, record: CheckpointRecord) -> None:
    """Compare every file with its SHA-256. Raises CheckpointDamaged."""
    for member in record.files:
        with ExitStack() as stack:
            _open(services, record, member, stack)


def _open(services: Services, record: CheckpointRecord, member: dict[str, Any], stack: ExitStack) -> OpenFile:
    path = services.artifacts.checkpoint_file(record.job_id, record.epoch, record.name, member["name"])
    opened = open_file(path, member["name"])
    stack.callback(opened.file.close)
    if not services.verified.is_intact(opened, member["bytes"], member["sha256"]):
        services.ledger.mark_checkpoint(record.id, damaged=True)
        raise CheckpointDamaged(f"{member['name']} of checkpoint {record.id} is not what was written; use another checkpoint", param="file")
    return opened
