"""/ and /static: the dashboard's own files, public, because they hold nothing of anybody's; everything they show comes from the API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import Response

from api.conditions import names_etag
from grpo_engine.contract.error import NotFound

router = APIRouter(tags=["dashboard"], include_in_schema=False)

FOLDER = Path(__file__).resolve().parents[1] / "dashboard"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What is served; other files in the folder are not."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
"""`no-cache`: kept, and compared by ETag each time, so that a new version of the server shows its own page at once."""


@dataclass(frozen=True)
class Asset:
    """A file as it goes over the wire."""

    body: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Every file of the dashboard by name, read once; requests choose from these and never name a path."""
    found: dict[str, Asset] = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            found[path.name] = Asset(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


@router.get("/")
def page(if_none_match: Annotated[str | None, Header(max_length=2000)] = None) -> Response:
    """The page."""
    return _serve("index.html", if_none_match)


@router.get("/static/{name}")
def static(name: str, if_none_match: Annotated[str | None, Header(max_length=2000)] = None) -> Response:
    """One of its files."""
    return _serve(name, if_none_match)


def _serve(name: str, if_none_match: str | None) -> Response:
    asset = assets().get(name)
    if asset is None:
        raise NotFound(f"the dashboard has no file {name[:80]!r}")
    headers = {**HEADERS, "etag": asset.etag}
    if if_none_match is not None and names_etag(if_none_match, asset.etag):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
