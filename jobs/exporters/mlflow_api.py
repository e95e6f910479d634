"""The few calls of MLflow's REST API 2.0 an exporter needs (mlflow.org, REST API): experiments, runs, batches of metrics.

Every call may be repeated: a run is found by its tag before one is made, and MLflow keeps a metric with the same key, step, time and
value once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

BATCH = 250
"""Metrics in one request; MLflow takes at most 1000."""
MAX_PARAMS = 100
MAX_VALUE = 500
TIMEOUT_S = 10.0
JOB_TAG = "grpo.job_id"


class MlflowUnreachable(Exception):
    """Nobody answers, or somebody who is not able to just now: everything waits."""


class MlflowRefused(Exception):
    """MLflow does not take what it was sent."""


@dataclass(frozen=True)
class Metric:
    """A reading; `timestamp_ms` is Unix time in milliseconds."""

    key: str
    value: float
    timestamp_ms: int
    step: int

    def to_json(self) -> dict[str, Any]:
        """As protobuf's JSON spells it: what is not finite is a word."""
        value: float | str = self.value
        if not math.isfinite(self.value):
            value = "NaN" if math.isnan(self.value) else "Infinity" if self.value > 0 else "-Infinity"
        return {"key": self.key, "value": value, "timestamp": self.timestamp_ms, "step": self.step}


class MlflowApi:
    """One tracking server. Use it from one thread."""

    def __init__(self, url: str, token: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=f"{self.url}/api/2.0/mlflow", headers=headers, timeout=timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def experiment(self, name: str) -> str:
        """Id of the experiment of this name, made when there is none."""
        found = self._ask("GET", "/experiments/get-by-name", params={"experiment_name": name}, may_be_missing=True)
        if found is None:
            made = self._ask("POST", "/experiments/create", json={"name": name}, may_be_missing=True)
            found = {"experiment": made} if made else self._ask("GET", "/experiments/get-by-name", params={"experiment_name": name})
        return str((found or {})["experiment"]["experiment_id"])

    def run(self, experiment_id: str, job_id: str, *, start_ms: int, tags: Mapping[str, str]) -> str:
        """Id of the job's run, made when there is none."""
        query = {"experiment_ids": [experiment_id], "filter": f"tags.`{JOB_TAG}` = '{job_id}'", "max_results": 1}
        found = self._ask("POST", "/runs/search", json=query) or {}
        runs = found.get("runs") or []
        if not runs:
            listed = [{"key": key, "value": value} for key, value in {**tags, JOB_TAG: job_id}.items()]
            body = {"experiment_id": experiment_id, "start_time": start_ms, "run_name": job_id, "tags": listed}
            runs = [(self._ask("POST", "/runs/create", json=body) or {})["run"]]
        return str(runs[0]["info"]["run_id"])

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Settings of the run: the first hundred, each cut to what MLflow keeps."""
        listed = [{"key": key, "value": value[:MAX_VALUE]} for key, value in list(params.items())[:MAX_PARAMS]]
        self._ask("POST", "/runs/log-batch", json={"run_id": run_id, "params": listed})

    def log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        """Readings, in requests of at most 250."""
        for start in range(0, len(metrics), BATCH):
            part = [metric.to_json() for metric in metrics[start : start + BATCH]]
            self._ask("POST", "/runs/log-batch", json={"run_id": run_id, "metrics": part})

    def finish(self, run_id: str, status: str, end_ms: int) -> None:
        """FINISHED, FAILED or KILLED."""
        self._ask("POST", "/runs/update", json={"run_id": run_id, "status": status, "end_time": end_ms})

    def _ask(self, method: str, path: str, *, may_be_missing: bool = False, **request: Any) -> dict[str, Any] | None:
        """The answer; None for what is not there (or is there already) where that may be. Raises MlflowUnreachable, MlflowRefused."""
        try:
            answer = self._http.request(method, path, **request)
            content = answer.json() if answer.is_success else {}
        except (httpx.HTTPError, ValueError) as error:
            raise MlflowUnreachable(f"no MLflow answers at {self.url} ({type(error).__name__}: {error})") from error
        if answer.is_success:
            return content if isinstance(content, dict) else {}
        words = f"MLflow at {self.url} answered {answer.status_code} to {path}: {answer.text[:200]}"
        if may_be_missing and any(code in answer.text for code in ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")):
            return None
        if answer.status_code in (401, 403, 408, 429) or answer.status_code >= 500:
            raise MlflowUnreachable(words)
        raise MlflowRefused(words)
