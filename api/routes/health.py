"""/healthz, /readyz (public) and /metrics (Prometheus, needs a key when there are keys)."""

from __future__ import annotations

import time
from collections import Counter

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response

from api.auth import requires
from api.deps import Services, ServicesDep
from api.openapi import produces
from api.present import as_float
from api.served_queues import unserved
from grpo_engine.contract.error import GrpoError
from jobs.exporters.mlflow import NAME as MLFLOW
from jobs.exporters.watermarks import Watermarks
from jobs.lifecycle import State

public = APIRouter(tags=["health"])
closed = APIRouter(tags=["health"])

_JOB_GAUGES = {
    "beta": ("grpo_job_beta", "KL coefficient of the last completed step"),
    "reward": ("grpo_job_reward_mean", "Mean reward of the last completed step"),
    "kl": ("grpo_job_kl_ref_nats", "KL to the reference of the last completed step, nats per token, by the job's estimator"),
}


@public.get("/healthz")
def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@public.get("/readyz", responses=produces("application/json", status=503))
def readyz(services: ServicesDep) -> Response:
    """Database, Redis, a dispatcher, a live worker, and disk. 503 when jobs could not be accepted or run; what is down says so by
    name. `warnings` tells of jobs that wait in a queue no live worker serves, and of
    an MLflow that takes no telemetry; the server is ready nevertheless."""
    checks = {
        "database": _database(services), "redis": _redis(services), "dispatcher": _dispatcher(services), "worker": _worker(services),
        "disk": _disk(services),
    }  # fmt: skip
    is_ready = all(check == "ok" for check in checks.values())
    headers = {} if is_ready else {"retry-after": "5"}
    shown = {"status": "ready" if is_ready else "not_ready", "checks": checks, "warnings": [*_unserved(services), *_held_up(services)]}
    return JSONResponse(shown, 200 if is_ready else 503, headers)


@closed.get("/metrics", response_class=Response, responses=produces("text/plain"))
@requires("read")
def prometheus(services: ServicesDep) -> Response:
    """Gauges in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gauges(services))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Gauges(Collector):
    """Read from the ledger at each scrape; keeps nothing."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> list[Metric]:
        ledger = self._services.ledger
        jobs = GaugeMetricFamily("grpo_jobs", "Jobs by state", labels=["state"])
        for state, count in ledger.count_by_state().items():
            jobs.add_metric([state.value], count)
        families: dict[str, GaugeMetricFamily] = {
            key: GaugeMetricFamily(name, text, labels=["job"]) for key, (name, text) in _JOB_GAUGES.items()
        }
        step = GaugeMetricFamily("grpo_job_step", "Last completed step of a running job", labels=["job"])
        last = GaugeMetricFamily("grpo_job_last_step_age_seconds", "Seconds since a running job completed a step", labels=["job"])
        for job in ledger.jobs_in([State.RUNNING, State.STOPPING]):
            step.add_metric([job.id], job.step)
            if "time" in job.latest:
                last.add_metric([job.id], time.time() - float(job.latest["time"]))
            estimator = job.spec.method.grpo.kl.estimator
            readings = {"beta": "beta/applied", "reward": "reward/mean", "kl": f"kl/ref/{estimator}/mean"}
            for key, name in readings.items():
                value = as_float(job.metrics.get(name))
                if value is not None:
                    families[key].add_metric([job.id], value)
        up = GaugeMetricFamily("grpo_redis_up", "Whether Redis answers", value=float(_redis(self._services) == "ok"))
        free = GaugeMetricFamily("grpo_data_free_bytes", "Free space of the data directory", value=self._services.artifacts.free_bytes())
        streams = GaugeMetricFamily("grpo_event_streams", "Open event streams", value=self._services.slots.open)
        return [jobs, step, last, *families.values(), up, free, streams]


def _database(services: Services) -> str:
    try:
        services.ledger.count_by_state()
    except GrpoError as error:
        return error.message
    return "ok"


def _redis(services: Services) -> str:
    try:
        services.live.ping()
    except GrpoError as error:
        return error.message
    return "ok"


def _dispatcher(services: Services) -> str:
    try:
        sign = services.live.dispatcher()
    except GrpoError as error:
        return error.message
    return "ok" if sign is not None else "no dispatcher has turned lately, so queued jobs do not start; start one with `grpo dispatcher`"


def _unserved(services: Services) -> list[str]:
    """One sentence for each queue in which jobs wait for a worker that is not there."""
    slots = services.served.slots()
    if slots is None:
        return []
    try:
        waiting = Counter(job.queue for job in services.ledger.jobs_in([State.QUEUED, State.DISPATCHED]))
    except GrpoError:
        return []  # `checks` names the database already
    plural = {1: "job waits"}
    return [f"{number} {plural.get(number, 'jobs wait')}: {unserved(queue)}" for queue, number in waiting.items() if not slots.get(queue)]


def _held_up(services: Services) -> list[str]:
    """What keeps telemetry from another system."""
    if not services.settings.mlflow_url:
        return []
    try:
        alarm = Watermarks(services.ledger.database, MLFLOW).alarm()
    except GrpoError:
        return []  # `checks` names the database already
    return [] if alarm is None else [alarm]


def _worker(services: Services) -> str:
    try:
        workers = services.live.workers()
    except GrpoError as error:
        return error.message
    return "ok" if workers else "no worker has reported lately; start one with `grpo worker`"


def _disk(services: Services) -> str:
    free, needed = services.artifacts.free_bytes(), services.settings.min_free_bytes
    return "ok" if free >= needed else f"{free} bytes are free and {needed} are needed; free some space"
