"""Jobs as MLflow runs: one run a job, every step's metrics, batches of at most 250, from a thread beside the dispatcher's turn.

The watermark (attempt, number of the event) moves after MLflow has taken the rows, in the database; a dispatcher that is killed
between the two sends them again, and MLflow keeps them once. Nothing is lost while MLflow is away: the rows wait in the ledger.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_engine.contract.error import GrpoError
from jobs.database import DatabaseDamaged
from jobs.exporters.mlflow_api import Metric, MlflowApi, MlflowRefused, MlflowUnreachable
from jobs.exporters.watermarks import Watermarks
from jobs.ledger import JobRecord, Ledger, StepRecord
from jobs.lifecycle import State
from jobs.settings import Settings

NAME = "mlflow"
ROWS = 100
"""Steps read from the ledger at a time."""
JOBS = 50
EVERY_S = 2.0
LONGEST_PAUSE_S = 60.0
_ENDS = {State.SUCCEEDED: "FINISHED", State.FAILED: "FAILED", State.CANCELLED: "KILLED"}
_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}

log = logging.getLogger(__name__)


class MlflowExporter:
    """Carries telemetry to MLflow. `turn()` returns at once."""

    def __init__(self, ledger: Ledger, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._settings = settings
        self._monotonic = monotonic
        self._marks = Watermarks(ledger.database, NAME)
        self._api: MlflowApi | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._running: Future[None] | None = None
        self._due_at = 0.0
        self._failures = 0
        self._is_closing = False

    def turn(self) -> None:
        """Begin a round if one is due and none is under way. Raises nothing of MLflow's."""
        if not self._settings.mlflow_url or self._monotonic() < self._due_at or (self._running and not self._running.done()):
            return
        self._running = self._pool.submit(self._round)

    def close(self) -> None:
        """Wait for the request under way, at most 10 s."""
        self._is_closing = True
        self._pool.shutdown(cancel_futures=True)
        if self._api is not None:
            self._api.close()

    def _round(self) -> None:
        try:
            refusals = self.export_all()
            self._marks.set_alarm("; ".join(refusals[:3]) or None)
            self._failures = 0
            self._due_at = self._monotonic() + EVERY_S
        except MlflowUnreachable as error:
            self._failures += 1
            if self._failures == 1:
                log.warning("telemetry waits: %s", error)
            self._pause()
            self._try_alarm(f"telemetry for MLflow waits: {error}")
        except (GrpoError, DatabaseDamaged, OSError) as error:
            log.warning("MLflow: %s; it is tried again", error)
            self._failures += 1
            self._pause()
        except Exception:
            log.exception("MLflow: a defect; it is tried again")
            self._failures += 1
            self._pause()

    def _pause(self) -> None:
        self._due_at = self._monotonic() + min(LONGEST_PAUSE_S, EVERY_S * 2.0 ** min(self._failures, 10)) * random.uniform(0.8, 1.0)

    def _try_alarm(self, message: str) -> None:
        try:
            self._marks.set_alarm(message)
        except (GrpoError, DatabaseDamaged) as error:
            log.warning("the alarm cannot be kept: %s", error)

    def export_all(self) -> list[str]:
        """One round over every job with news; what MLflow refused, in words. Raises MlflowUnreachable and what the database raises."""
        refusals: list[str] = []
        after = ""
        while (ids := self._marks.unfinished(JOBS, after)) and not self._is_closing:
            for job_id in ids:
                try:
                    self._export(self._ledger.get_job(job_id))
                except MlflowRefused as error:
                    log.warning("job %s: %s", job_id, error)
                    refusals.append(f"job {job_id}: {error}")
            after = ids[-1]
        return refusals

    def _export(self, job: JobRecord) -> None:
        mark = self._marks.read(job.id)
        position = (int(mark.get("epoch", 0)), int(mark.get("seq", 0)))
        rows = self._ledger.metrics_after(job.id, position, ROWS)
        if not rows and not job.is_terminal:
            return
        api = self._connected()
        run_id = mark.get("run_id") or self._begin(api, job)
        while rows and not self._is_closing:
            api.log_metrics(run_id, list(_metrics(rows)))
            position = (rows[-1].epoch, rows[-1].seq)
            self._marks.write(job.id, {"run_id": run_id, "epoch": position[0], "seq": position[1]})
            rows = self._ledger.metrics_after(job.id, position, ROWS)
        if job.is_terminal and not rows:
            api.finish(run_id, _ENDS[job.state], int((job.finished_at or job.updated_at) * 1000))
            self._marks.write(job.id, {"run_id": run_id, "epoch": position[0], "seq": position[1], "done": True})

    def _begin(self, api: MlflowApi, job: JobRecord) -> str:
        experiment = api.experiment(self._settings.mlflow_experiment)
        tags = {"grpo.model": job.spec.model, "mlflow.source.name": "grpo-server", **{f"grpo.{k}": v for k, v in job.spec.metadata.items()}}
        run_id = api.run(experiment, job.id, start_ms=int((job.started_at or job.created_at) * 1000), tags=tags)
        api.log_params(run_id, dict(_params(job)))
        self._marks.write(job.id, {"run_id": run_id})
        return run_id

    def _connected(self) -> MlflowApi:
        if self._api is None:
            self._api = MlflowApi(self._settings.mlflow_url, self._settings.mlflow_token)
        return self._api


def _metrics(rows: list[StepRecord]) -> Iterator[Metric]:
    for row in rows:
        for name, raw in row.metrics.items():
            value = _WORDS.get(str(raw.get("nonfinite"))) if isinstance(raw, dict) else raw
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield Metric(name, float(value), int(row.time * 1000), row.step)


def _params(job: JobRecord) -> Iterator[tuple[str, str]]:
    """The settings people compare runs by, first; then all others, flat."""
    spec: dict[str, Any] = json.loads(job.spec_json)
    yield "model", job.spec.model
    yield "seed", str(job.spec.seed)
    grpo = spec["method"]["grpo"]
    for name in ("beta", "kl", "loss", "optimizer", "sampling", "limits"):
        yield from _flat(name, grpo.get(name))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)
