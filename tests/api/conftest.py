"""A real server on a real port, and a hand that plays dispatcher, worker and engine through the ledger and Redis."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.sse import StreamLimits
from grpo_engine.contract.event import EngineEvent
from jobs.ledger import Ledger, open_ledger
from jobs.lifecycle import State
from jobs.live import Live
from jobs.settings import Settings
from tests.conftest import ValkeyServer
from tests.server import Server

ROWS = [{"prompt": f"{a} + {a} = ", "answer": str(2 * a)} for a in range(1, 21)]


@dataclass
class Hand:
    """Moves jobs as dispatcher, worker and engine would."""

    ledger: Ledger
    live: Live

    def start(self, job_id: str) -> int:
        """Dispatch and claim; returns the epoch."""
        job = self.ledger.get_job(job_id)
        dispatched = self.ledger.dispatch(job_id, from_epoch=job.epoch)
        assert dispatched is not None
        assert self.ledger.mark_running(job_id, dispatched.epoch, "worker-1") is not None
        return dispatched.epoch

    def ingest(self, job_id: str, *events: EngineEvent) -> None:
        assert self.ledger.ingest(job_id, events).taken == len(events)

    def publish(self, job_id: str, *events: EngineEvent) -> None:
        for event in events:
            assert self.live.publish_event(job_id, event.to_line(), event.epoch, event.seq) == "appended"

    def finish(self, job_id: str, state: str = "succeeded") -> None:
        job = self.ledger.get_job(job_id)
        assert self.ledger.transition(job_id, epoch=job.epoch, expected=[job.state], to=State(state), reason="completed") is not None


def step_event(epoch: int, seq: int, step: int, **metrics: Any) -> EngineEvent:
    """Telemetry of a step; `kl` and `beta` are short for the names they usually stand for."""
    values = {"kl/ref/k3/mean": 0.01 * step, "beta/applied": 0.04, "reward/mean": 0.5, "time/step_s": 2.0, **metrics}
    data = {"metrics": values, "beta": {"beta": 0.04, "target": 0.1, "ref_sha256": "a" * 64}}
    return EngineEvent(
        epoch=epoch, seq=seq, time=1_700_000_000.0 + seq, type="step.completed", step=step, message=f"step {step}", data=data
    )


def event(epoch: int, seq: int, kind: str, step: int | None = None, /, **data: Any) -> EngineEvent:
    return EngineEvent(epoch=epoch, seq=seq, time=1_700_000_000.0 + seq, type=kind, step=step, message=kind, data=data)


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        pause.wait(0.01)


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def upload(client: httpx.Client, content: bytes = b"", name: str = "sums.jsonl") -> str:
    answer = client.post("/v1/files", files={"file": (name, content or jsonl(ROWS))}, data={"purpose": "fine-tune"})
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def spec(training_file: str, **grpo: Any) -> dict[str, Any]:
    config = {
        "grader": {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"},
        "beta": 0.04,
        "limits": {"num_steps": 10},
        **grpo,
    }
    return {"model": "tiny", "training_file": training_file, "method": {"type": "grpo", "grpo": config}}


def create(client: httpx.Client, **grpo: Any) -> str:
    answer = client.post("/v1/fine_tuning/jobs", json=spec(upload(client), **grpo))
    assert answer.status_code == 201, answer.text
    job_id: str = answer.json()["id"]
    return job_id


def write_model(root: Path) -> Path:
    """A model directory with `tiny`, as far as the API looks at it. Returns `root`."""
    folder = root / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    (folder / "model.safetensors").write_bytes(bytes(4096))
    return root


@pytest.fixture
def limits() -> StreamLimits:
    return StreamLimits(heartbeat_s=0.2, poll_s=0.05, send_timeout_s=2.0, retry_redis_s=0.2)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with today's schema, to be copied: migrating anew for each test takes longer than the test."""
    directory = tmp_path_factory.mktemp("database")
    open_ledger(Settings(data_dir=directory).resolved()).close()
    return directory / "grpo.db"


@pytest.fixture
def api_settings(settings: Settings, tmp_path: Path, empty_database: Path) -> Settings:
    """With a model folder that holds `tiny`."""
    settings.data_dir.mkdir()
    shutil.copyfile(empty_database, settings.data_dir / "grpo.db")
    return replace(settings, model_dir=write_model(tmp_path / "models")).resolved()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory, valkey_session: ValkeyServer) -> Iterator[Server]:
    """One server for the tables of a module: for requests that change nothing, or whose changes nobody else looks at."""
    root = tmp_path_factory.mktemp("shared")
    chosen = Settings(
        data_dir=root / "data", redis_url=valkey_session.url, model_dir=write_model(root / "models"), redis_timeout_s=1.0, min_free_bytes=0
    )
    running = Server(chosen.resolved(), StreamLimits(heartbeat_s=0.2, poll_s=0.05))
    yield running
    running.stop()


@pytest.fixture
def shared_client(shared_server: Server) -> Iterator[httpx.Client]:
    with shared_server.client() as opened:
        yield opened


@pytest.fixture
def server(api_settings: Settings, limits: StreamLimits) -> Iterator[Server]:
    running = Server(api_settings, limits)
    yield running
    running.stop()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def hand(api_settings: Settings, server: Server, ledger: Ledger) -> Iterator[Hand]:
    live = Live.connect(api_settings)
    yield Hand(ledger, live)
    live.close()
