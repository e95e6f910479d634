"""The web application: parts, layers, routers.

`create_app` is also uvicorn's factory: `uvicorn --factory api.app:create_app` reads the settings from the environment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from api import errors
from api.auth import PUBLIC_PATHS, KeyRing, authorise, require_safe_bind, requires
from api.deps import Services, known_query
from api.middleware import BodyLimit, RequestId
from api.openapi import describe
from api.probing import Probes
from api.queue_places import QueuePlaces
from api.rate_limit import RateLimit
from api.routes import (
    checkpoints,
    compare,
    control,
    dashboard,
    events,
    files,
    forks,
    graders,
    guardrails,
    health,
    jobs,
    logs,
    metrics,
    models,
    promotions,
    rollouts,
    sweeps,
    validation,
    webhooks,
)
from api.served_queues import ServedQueues
from api.sse import StreamLimits, StreamSlots
from api.tails import Tails
from api.tracing import Tracing
from api.verify import VerifiedFiles
from grpo_engine.grader import ProcessPool
from jobs.ledger import open_ledger
from jobs.live import Live
from jobs.otel import Otel
from jobs.rebuild import refuse_emptied
from jobs.settings import Settings

ROUTERS = (
    jobs, validation, forks, events, metrics, rollouts, logs, checkpoints, promotions, control, guardrails, compare, sweeps, files, models,
    graders, webhooks,
)  # fmt: skip
"""Closed by default: `authorise` stands before every route of these."""


def create_app(settings: Settings | None = None, *, limits: StreamLimits | None = None) -> FastAPI:
    """The application over one data directory, database and Redis. Raises InvalidRequest when the bind would be unsafe."""
    parts = _build(settings or Settings.from_env(), limits)
    require_safe_bind(parts.settings.host, parts.keys)
    otel = Otel.open(parts.settings, "grpo-api")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        parts.grader_pool.close()
        parts.probes.close()
        parts.served.close()
        app.state.rate_limit.close()
        app.state.refused_limit.close()
        parts.live.close()
        parts.ledger.close()
        if otel is not None:
            await run_in_threadpool(otel.close)

    app = FastAPI(
        title="GRPO training server",
        version=version("grpo-server"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.services = parts
    app.state.keys = parts.keys
    app.state.rate_limit = RateLimit(parts.live, parts.settings.rate_limit_per_minute)
    app.state.refused_limit = RateLimit(parts.live, parts.settings.refused_limit_per_minute)
    closed = [Depends(authorise), Depends(known_query)]
    for module in ROUTERS:
        app.include_router(module.router, dependencies=closed)
    app.include_router(health.closed, dependencies=closed)
    app.include_router(_description(app), dependencies=closed)
    app.include_router(health.public)
    app.include_router(dashboard.router)
    errors.install(app)
    app.add_middleware(BodyLimit, limit=parts.settings.body_limit_bytes, file_limit=parts.settings.file_limit_bytes)
    app.add_middleware(Tracing, otel=otel, reads=parts.settings.otel_reads)
    app.add_middleware(RequestId)
    return app


def _build(settings: Settings, limits: StreamLimits | None) -> Services:
    ledger = open_ledger(settings)
    refuse_emptied(ledger)
    live = Live.connect(settings)
    served = ServedQueues(live)
    chosen = limits or StreamLimits(poll_s=settings.poll_s, max_streams=settings.sse_total, max_per_key=settings.sse_per_key)
    return Services(
        settings=settings,
        artifacts=ledger.artifacts,
        ledger=ledger,
        live=live,
        keys=KeyRing(ledger, settings.api_key),
        slots=StreamSlots(chosen),
        grader_pool=ProcessPool(),
        verified=VerifiedFiles(),
        places=QueuePlaces(ledger.database, served),
        served=served,
        probes=Probes(settings, ledger.artifacts, served),
        tails=Tails(settings),
    )


def _description(app: FastAPI) -> APIRouter:
    router = APIRouter(tags=["description"])

    @router.get("/openapi.json", include_in_schema=False)
    @requires("read")
    def openapi() -> JSONResponse:
        """The OpenAPI document."""
        return JSONResponse(describe(app, PUBLIC_PATHS))

    return router
