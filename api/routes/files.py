"""/v1/files: datasets. Uploads are streamed to disk and read line by line before they are accepted."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.auth import requires
from api.deps import ServicesDep, refuse_coded
from api.download import file_response, open_file, without_body
from api.files import PURPOSE, keep, require_space
from api.openapi import produces
from api.present import answer, file_view
from api.upload import receive_upload
from grpo_engine.contract.view import Deleted, File, Page

router = APIRouter(prefix="/v1/files", tags=["files"])

FileId = Annotated[str, Path(max_length=80)]
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "const": PURPOSE}},
                }
            }
        },
    }
}


@router.post("", response_model=File, openapi_extra=_FORM)
@requires("submit")
async def upload(request: Request, services: ServicesDep) -> Response:
    """Upload JSONL, CSV or Parquet. A line that is no row is a 422 that names it, and nothing is kept."""
    refuse_coded(request)
    await run_in_threadpool(require_space, services)
    received = await receive_upload(request, services.artifacts.files_dir, services.settings.file_limit_bytes)
    return answer(file_view(await run_in_threadpool(keep, services, received)))


@router.get("", response_model=Page[File])
@requires("read")
def list_files(
    services: ServicesDep,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """A page of files, newest first."""
    page = services.ledger.list_files(after=after, limit=limit, order=order, purpose=purpose)
    shown = [file_view(record) for record in page.data]
    ids = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    return answer(Page[File](data=shown, has_more=page.has_more, **ids))


@router.get("/{file_id}", response_model=File)
@requires("read")
def get(file_id: FileId, services: ServicesDep) -> Response:
    """One file."""
    return answer(file_view(services.ledger.get_file(file_id)))


@router.head("/{file_id}/content", include_in_schema=False)
@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses=produces("application/octet-stream") | produces("application/octet-stream", status=206),
)
@requires("read")
def content(
    file_id: FileId,
    request: Request,
    services: ServicesDep,
    range_header: Annotated[str | None, Header(alias="range", max_length=200)] = None,
    if_range: Annotated[str | None, Header(max_length=200)] = None,
) -> Response:
    """The bytes as they were uploaded, by range when asked."""
    record = services.ledger.get_file(file_id)
    opened = open_file(services.artifacts.file_content(file_id), record.filename)
    kind = "application/octet-stream"
    response = file_response(opened, range_header=range_header, if_range=if_range, etag=f'"{record.sha256}"', media_type=kind)
    return without_body(response, [opened]) if request.method == "HEAD" else response


@router.delete("/{file_id}", response_model=Deleted)
@requires("submit")
def delete(file_id: FileId, services: ServicesDep) -> Response:
    """Forget a file. Jobs that were created from it keep their own copy."""
    services.ledger.delete_file(file_id)
    return answer(Deleted(id=file_id, object="file"))
