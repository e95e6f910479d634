"""What handlers are given: the server's parts, the caller, and a strictly decoded JSON body."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from starlette.concurrency import run_in_threadpool

from api.auth import Caller, KeyRing
from api.openapi import extra_query
from api.probing import Probes
from api.queue_places import QueuePlaces
from api.served_queues import ServedQueues
from api.sse import StreamLimits, StreamSlots
from api.strict_json import loads_object
from api.tails import Tails
from api.verify import VerifiedFiles
from grpo_engine.contract.error import InvalidRequest, NotFound, UnsupportedMediaType
from grpo_engine.contract.nearest import nearest
from grpo_engine.grader import ProcessPool
from jobs.artifacts import Artifacts
from jobs.ledger import Ledger
from jobs.live import Live
from jobs.settings import Settings

_LARGE_BODY = 65_536
_WHOLE = re.compile("-?[0-9]+")


@dataclass(frozen=True)
class Services:
    """Everything a handler may use."""

    settings: Settings
    artifacts: Artifacts
    ledger: Ledger
    live: Live
    keys: KeyRing
    slots: StreamSlots
    grader_pool: ProcessPool
    """Shared by everyone who tries a grader."""
    verified: VerifiedFiles
    places: QueuePlaces
    served: ServedQueues
    probes: Probes
    tails: Tails

    @property
    def limits(self) -> StreamLimits:
        """Times of the event streams."""
        return self.slots.limits


async def services(request: Request) -> Services:
    """The server's parts. Async, as everything here that only looks at memory: a plain function costs a change of threads."""
    found: Services = request.app.state.services
    return found


async def caller(request: Request) -> Caller:
    """Who sent the request; set by `authorise`."""
    found: Caller = request.state.caller
    return found


async def json_body(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises UnsupportedMediaType (415), MalformedJson (400) or InvalidRequest (422)."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower()
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
        raise UnsupportedMediaType("the body is not marked as JSON; send it as application/json in UTF-8", param="content-type")
    refuse_coded(request)
    body = await request.body()
    if len(body) > _LARGE_BODY:
        return await run_in_threadpool(loads_object, body)
    return loads_object(body)


def refuse_coded(request: Request) -> None:
    """Bodies are taken as they are. Raises UnsupportedMediaType (415) for a compressed one."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(
            "the body is compressed; send it as it is", param="content-encoding", headers={"accept-encoding": "identity"}
        )


async def known_query(request: Request) -> None:
    """Router-level dependency: a query parameter that the route does not know, or that is given twice, is an error, never ignored; and
    so is a NUL character, which PostgreSQL takes in no text, and a whole number in other than digits (`1.0`, `+5`)."""
    for name, value in request.path_params.items():
        if "\0" in str(value):
            kind = InvalidRequest if name == "key" else NotFound
            raise kind(f"{name} holds a NUL character, which no {name} has; correct the address", param=name)
    route = request.scope.get("route")
    dependant = getattr(route, "dependant", None)
    if dependant is None:
        return
    if not request.scope["query_string"]:
        return
    kinds = _query_kinds(dependant)
    known = kinds.keys() | extra_query(request.scope.get("endpoint"))
    seen: set[str] = set()
    for name, value in request.query_params.multi_items():
        if "\0" in name + value:
            shown = name.replace("\0", "")[:64]
            raise InvalidRequest(f"query parameter {shown!r} holds a NUL character; remove it", param=shown or "query")
        if name in seen and "list[" not in str(kinds.get(name)):
            raise InvalidRequest(f"query parameter {name[:64]!r} is given twice; keep one", param=name[:64])
        seen.add(name)
        if int in (kinds.get(name), *get_args(kinds.get(name))) and _WHOLE.fullmatch(value) is None:
            raise InvalidRequest(f"query parameter {name} is no whole number; write it in digits, such as 20", param=name)
        if name in known or (name.endswith("]") and f"{name.partition('[')[0]}[]" in known):
            continue
        near = nearest(name, known)
        remedy = f"did you mean {near!r}?" if near else "remove it"
        raise InvalidRequest(f"unknown query parameter {name[:64]!r}; {remedy}", param=name[:64])


def _query_kinds(dependant: Dependant) -> dict[str, Any]:
    """Annotations of the route's query parameters."""
    kinds: dict[str, Any] = {field.alias: field.field_info.annotation for field in dependant.query_params}
    for inner in dependant.dependencies:
        kinds.update(_query_kinds(inner))
    return kinds


ServicesDep = Annotated[Services, Depends(services)]
CallerDep = Annotated[Caller, Depends(caller)]
BodyDep = Annotated[dict[str, Any], Depends(json_body)]
