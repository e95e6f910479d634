"""Telemetry to MLflow: nothing lost, nothing twice, nobody waits; against a small tracking server here and a real one on request.

The real one needs `mlflow`, which takes minutes to install, so it is opt-in: `MLFLOW_COMMAND=/path/to/venv/bin/mlflow pytest -m slow`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from grpo_engine.contract.event import EngineEvent
from jobs.exporters.mlflow import NAME, MlflowExporter
from jobs.exporters.mlflow_api import MlflowApi, MlflowUnreachable
from jobs.exporters.watermarks import Watermarks
from jobs.ledger import JobRecord, Ledger
from jobs.lifecycle import State
from jobs.settings import Settings, SettingsError
from tests.conftest import free_port
from tests.jobs.makers import make_job
from tests.listener import Heard, Reply, listen


@dataclass
class Tracking:
    """What MLflow keeps, and how it shall answer."""

    url: str = ""
    experiments: dict[str, str] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: set[tuple[str, str, str, int, int]] = field(default_factory=set)
    batches: list[int] = field(default_factory=list)
    status: int = 200
    lose_answers: int = 0
    """So many of the next batches are kept and then answered with an error."""
    hold: threading.Event | None = None

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.hold is not None:
            self.hold.wait(20)
        if self.status != 200:
            return self.status, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "later"}
        name = path.removeprefix("/api/2.0/mlflow")
        if name == "/experiments/get-by-name":
            known = self.experiments.get(query["experiment_name"][0])
            return (200, {"experiment": {"experiment_id": known}}) if known else (404, {"error_code": "RESOURCE_DOES_NOT_EXIST"})
        if name == "/experiments/create":
            self.experiments[body["name"]] = "7"
            return 200, {"experiment_id": "7"}
        if name == "/runs/search":
            found = [run for run in self.runs.values() if f"'{run['tags']['grpo.job_id']}'" in body["filter"]]
            return 200, {"runs": found} if found else {}
        if name == "/runs/create":
            run_id = f"run-{len(self.runs)}"
            tags = {tag["key"]: tag["value"] for tag in body["tags"]}
            self.runs[run_id] = {"info": {"run_id": run_id, "status": "RUNNING"}, "tags": tags, "params": {}}
            return 200, {"run": self.runs[run_id]}
        if name == "/runs/update":
            self.runs[body["run_id"]]["info"] |= body
            return 200, {}
        assert name == "/runs/log-batch", name
        return self._batch(body)

    def _batch(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.runs[body["run_id"]]["params"] |= {one["key"]: one["value"] for one in body.get("params", ())}
        points = body.get("metrics", [])
        if points:
            self.batches.append(len(points))
        self.metrics |= {(body["run_id"], one["key"], str(one["value"]), one["step"], one["timestamp"]) for one in points}
        if points and self.lose_answers:
            self.lose_answers -= 1
            return 502, {}
        return 200, {}

    def steps(self, key: str) -> list[int]:
        return sorted(step for _, name, _, step, _ in self.metrics if name == key)

    def hear(self, heard: Heard) -> Reply:
        parts = urlsplit(heard.target)
        status, content = self.answer(parts.path, parse_qs(parts.query), json.loads(heard.body or b"{}"))
        return Reply(json.dumps(content).encode(), status)


@pytest.fixture
def tracking() -> Iterator[Tracking]:
    state = Tracking()
    with listen(state.hear) as address:
        state.url = address
        yield state
        if state.hold is not None:
            state.hold.set()


def running(ledger: Ledger) -> JobRecord:
    job = make_job(ledger)
    assert ledger.dispatch(job.id, from_epoch=0) is not None
    started = ledger.mark_running(job.id, 1, "worker-1")
    assert started is not None
    return started


def take(ledger: Ledger, job: JobRecord, steps: range, *, epoch: int = 1, names: int = 3) -> None:
    """Engine events of these steps; step n is event n."""
    values = {f"system/gauge{number}": float(number) for number in range(names)}
    events = [
        EngineEvent(
            epoch=epoch, seq=step, time=1_700_000_000.0 + step, type="step.completed", step=step, message="step",
            data={"metrics": {"reward/mean": 0.1 * step, **values}, "beta": {}},
        )
        for step in steps
    ]  # fmt: skip
    assert ledger.ingest(job.id, events).taken == len(events)


def finish(ledger: Ledger, job: JobRecord) -> None:
    assert ledger.transition(job.id, epoch=1, expected=[State.RUNNING], to=State.SUCCEEDED, reason="completed") is not None


def exporter(ledger: Ledger, settings: Settings, url: str) -> MlflowExporter:
    return MlflowExporter(ledger, replace(settings, mlflow_url=url))


def test_a_job_is_a_run_with_its_settings_and_every_step_once(ledger: Ledger, settings: Settings, tracking: Tracking) -> None:
    job = running(ledger)
    carrier = exporter(ledger, settings, tracking.url)
    take(ledger, job, range(1, 4), names=150)
    assert carrier.export_all() == []
    take(ledger, job, range(4, 6))
    finish(ledger, job)
    carrier.export_all()
    carrier.export_all()
    (run,) = tracking.runs.values()
    assert run["tags"]["grpo.job_id"] == job.id
    assert run["info"]["status"] == "FINISHED"
    assert run["params"]["model"] == "tiny"
    assert run["params"]["beta.rule"] == "fixed"
    assert tracking.steps("reward/mean") == [1, 2, 3, 4, 5]
    assert max(tracking.batches) == 250
    assert Watermarks(ledger.database, NAME).unfinished(10) == []
    carrier.close()


def test_a_lost_answer_and_a_restart_bring_nothing_twice(ledger: Ledger, settings: Settings, tracking: Tracking) -> None:
    job = running(ledger)
    take(ledger, job, range(1, 8))
    tracking.lose_answers = 1
    first = exporter(ledger, settings, tracking.url)
    with pytest.raises(MlflowUnreachable):
        first.export_all()
    first.close()
    second = exporter(ledger, settings, tracking.url)
    assert second.export_all() == []
    assert len(tracking.runs) == 1
    assert tracking.steps("reward/mean") == list(range(1, 8))
    second.close()


def test_while_mlflow_is_away_telemetry_waits_and_an_alarm_says_so(ledger: Ledger, settings: Settings, tracking: Tracking) -> None:
    job = running(ledger)
    take(ledger, job, range(1, 3))
    clock = [0.0]
    carrier = MlflowExporter(ledger, replace(settings, mlflow_url=tracking.url), lambda: clock[0])
    tracking.status = 503
    alarms = Watermarks(ledger.database, NAME)

    def turned() -> None:
        clock[0] += 100.0
        carrier.turn()
        assert carrier._running is not None
        carrier._running.result(timeout=20)

    turned()
    assert "answered 503" in (alarms.alarm() or "")
    take(ledger, job, range(3, 5))
    tracking.status = 200
    turned()
    assert alarms.alarm() is None
    assert tracking.steps("reward/mean") == [1, 2, 3, 4]
    tracking.status = 400
    take(ledger, job, range(5, 6))
    turned()
    assert f"job {job.id}" in (alarms.alarm() or "")
    carrier.close()


def test_a_turn_does_not_wait_for_an_mlflow_that_hangs(ledger: Ledger, settings: Settings, tracking: Tracking) -> None:
    take(ledger, running(ledger), range(1, 3))
    tracking.hold = threading.Event()
    carrier = exporter(ledger, settings, tracking.url)
    carrier.turn()
    carrier.turn()
    assert carrier._running is not None
    assert not carrier._running.done()
    tracking.hold.set()
    carrier._running.result(timeout=20)
    assert tracking.steps("reward/mean") == [1, 2]
    carrier.close()


def test_without_an_address_nothing_is_exported(ledger: Ledger, settings: Settings) -> None:
    carrier = MlflowExporter(ledger, settings)
    carrier.turn()
    assert carrier._running is None
    carrier.close()
    with pytest.raises(SettingsError, match="GRPO_MLFLOW_URL"):
        replace(settings, mlflow_url="mlflow:5000").resolved()


@pytest.mark.slow
@pytest.mark.skipif("MLFLOW_COMMAND" not in os.environ, reason="installing mlflow takes minutes: name its command in MLFLOW_COMMAND")
def test_a_real_tracking_server_keeps_every_reading_once(ledger: Ledger, settings: Settings, tmp_path: Path) -> None:
    port = free_port()
    command = [os.environ["MLFLOW_COMMAND"], "server", "--port", str(port), "--backend-store-uri", f"sqlite:///{tmp_path}/m.db"]
    server = subprocess.Popen([*command, "--workers", "1"], cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while not _answers(f"{url}/health"):
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.2)
        job = running(ledger)
        take(ledger, job, range(1, 21), names=150)
        nan = {"metrics": {"reward/mean": {"value": None, "nonfinite": "nan"}}, "beta": {}}
        odd = EngineEvent(epoch=1, seq=21, time=1_700_000_099.0, type="step.completed", step=21, message="step", data=nan)
        assert ledger.ingest(job.id, [odd]).taken == 1
        finish(ledger, job)
        carrier = exporter(ledger, settings, url)
        assert carrier.export_all() == []
        # As after a crash between MLflow's answer and the watermark: everything is sent once more.
        Watermarks(ledger.database, NAME).write(job.id, {})
        assert carrier.export_all() == []
        carrier.close()
        api = MlflowApi(url)
        run_id = api.run(api.experiment("grpo"), job.id, start_ms=0, tags={})
        api.close()
        run = httpx.get(f"{url}/api/2.0/mlflow/runs/get", params={"run_id": run_id}).json()["run"]
        assert run["info"]["status"] == "FINISHED"
        assert {"key": "model", "value": "tiny"} in run["data"]["params"]
        path, asked = f"{url}/api/2.0/mlflow/metrics/get-history", {"run_id": run_id, "metric_key": "reward/mean"}
        history = httpx.get(path, params=asked).json()["metrics"]
        assert sorted(point.get("step", 0) for point in history) == list(range(1, 22))
        assert sum(math.isnan(float(point["value"])) for point in history) == 1
    finally:
        server.terminate()
        server.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False
