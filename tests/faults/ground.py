"""A whole server to harm: Valkey, SQLite, API, dispatcher and worker as processes, the oracles watching.

`ground(directory)` runs the scripted engine, whose attempts take milliseconds; `ground(directory, scripted=False)` the real one
on a tiny random model.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from api.embedded.stack import Stack
from jobs.ledger import JobRecord, open_ledger
from jobs.queue import CPU_QUEUE, Publisher
from jobs.settings import Settings
from tests.faults.oracles import Oracles, Undisturbed, undisturbed
from tests.stack import MODEL, SHORT_TIMES, LiveStack, job_spec, wait_for

HERE = Path(__file__).parent


class Ground(LiveStack):
    """A running server, its ledger opened from here as well, and hands that do harm."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        self.ledger = open_ledger(stack.settings)
        self.artifacts = self.ledger.artifacts
        self.oracles = Oracles(self.ledger, self.artifacts.jobs_dir)
        self._file: str | None = None
        self._likes: dict[int, Undisturbed] = {}

    def close(self) -> None:
        """Let go of everything but the processes."""
        self.oracles.close()
        self.ledger.close()
        self.client.close()

    # Jobs

    def spec(self, script: str = "", steps: int = 12, **grpo: Any) -> dict[str, Any]:
        """A job of so many steps; `script` is for the scripted engine."""
        if self._file is None:
            self._file = self.upload()
        spec = job_spec(self._file, num_steps=steps, **grpo)
        return {**spec, "seed": 7, "metadata": {"script": script} if script else {}}

    def submit(self, script: str = "", steps: int = 12, **grpo: Any) -> str:
        """Post a job; returns its id."""
        return self.client.create_job(self.spec(script, steps, **grpo)).id

    def like(self, steps: int = 12) -> Undisturbed:
        """What a run of so many steps gives when nobody disturbs it."""
        if steps not in self._likes:
            job_id = self.submit(steps=steps)
            self.end(job_id, "succeeded")
            self._likes[steps] = undisturbed(self.ledger, job_id)
        return self._likes[steps]

    def job(self, job_id: str) -> JobRecord:
        """The job as the database knows it."""
        return self.ledger.get_job(job_id)

    def end(
        self, job_id: str, ends: str, like: Undisturbed | None = None, timeout_s: float = 90.0, *, was_hidden: bool = False
    ) -> JobRecord:
        """Wait for the job's end and put it to the oracles."""
        wait_for(lambda: self.job(job_id).is_terminal, f"the end of {job_id}", timeout_s)
        return self.oracles.judge(job_id, ends, like, was_hidden=was_hidden)

    def story(self, job_id: str) -> list[str]:
        """Types of the job's history."""
        return [event.type for event in self.ledger.events(job_id, limit=10_000).data]

    def written(self, job_id: str, epoch: int = 1) -> int:
        """Steps an attempt has completed, whoever has heard of it."""
        path = self.artifacts.events_path(job_id, epoch)
        return path.read_text().count('"type":"step.completed"') if path.exists() else 0

    def reach(self, job_id: str, step: int, epoch: int = 1) -> None:
        """Wait until an attempt has completed so many steps."""
        wait_for(lambda: self.written(job_id, epoch) >= step, f"{step} steps of attempt {epoch} of {job_id}", 90)

    # Harm

    def process(self, name: str) -> psutil.Process:
        """A part: valkey, api, dispatcher or worker."""
        process = self.stack.children[name].process
        assert process is not None
        return psutil.Process(process.pid)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a part a signal."""
        self.process(name).send_signal(number)

    def leave(self, name: str) -> int:
        """SIGTERM a part and wait for its end; returns its exit status."""
        process = self.stack.children[name].process
        assert process is not None
        process.terminate()
        return process.wait(timeout=60)

    def run_file(self, job_id: str, epoch: int = 1) -> dict[str, Any]:
        """Who runs and who supervises an attempt; `pid` appears with the engine."""
        path = self.artifacts.attempt_dir(job_id, epoch) / "run.json"

        def run() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            return found if "pid" in found else {}

        return wait_for(run, f"the engine of {job_id}")

    def engine(self, job_id: str, epoch: int = 1) -> psutil.Process:
        """The engine of an attempt."""
        return psutil.Process(self.run_file(job_id, epoch)["pid"])

    def pool_child(self, job_id: str, epoch: int = 1) -> psutil.Process:
        """The process that supervises an attempt."""
        return psutil.Process(self.run_file(job_id, epoch)["supervisor"]["pid"])

    def restart(self, name: str) -> None:
        """Start a part again and wait until it is of use."""
        super().restart(name)
        if name == "worker":
            pid = self.process("worker").pid
            wait_for(lambda: pid in self._listed_workers(), "the worker's heartbeat")
        elif name == "api":
            wait_for(self._answers, "the API to answer")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _listed_workers(self) -> set[int]:
        with self.redis() as client:
            beats = [client.get(key) for key in client.scan_iter("grpo:worker:*")]
        return {json.loads(beat)["pid"] for beat in beats if beat}

    def redis(self) -> redis.Redis:
        """A client of the server's Redis."""
        return redis.Redis.from_url(self.settings.redis_url, decode_responses=True, socket_timeout=5)

    def deliver(self, job_id: str, epoch: int) -> None:
        """Send an attempt's message once more."""
        publisher = Publisher(self.settings)
        try:
            publisher.enqueue(job_id, epoch, CPU_QUEUE)
        finally:
            publisher.close()

    def log(self, name: str) -> str:
        """What a part has said."""
        return self.stack.children[name].plan.log.read_text(errors="replace")


def add_environment(stack: Stack, name: str, environment: dict[str, str]) -> None:
    """Start a part with these variables beside its own."""
    child = stack.children[name]
    child.plan = dataclasses.replace(child.plan, environment={**child.plan.environment, **environment})


@contextmanager
def ground(
    directory: Path, *, scripted: bool = True, prepare: Callable[[Stack], None] = lambda _: None, **overrides: Any
) -> Iterator[Ground]:
    """A server of its own below `directory`. Call it from the main thread. Afterwards no process of it is left.

    `prepare` may change the parts before they start.
    """
    models = directory / "models"
    _make_model(models / MODEL, scripted=scripted)
    settings = Settings(
        data_dir=directory / "data", port=0, model_dir=models, **{**SHORT_TIMES, "stalled_after_s": 4.0, **overrides}
    ).resolved()
    stack = Stack(settings, say=print)
    prepare(stack)
    if scripted:
        worker = stack.children["worker"]
        environment = {**worker.plan.environment, "PYTHONPATH": str(HERE.parents[1])}
        command = [sys.executable, str(HERE / "scripted_worker.py")]
        worker.plan = dataclasses.replace(worker.plan, command=command, environment=environment)
    stack.start()
    server = Ground(stack)
    try:
        yield server
    finally:
        server.close()
        stack.stop()
        assert server.engines() == []


def _make_model(folder: Path, *, scripted: bool) -> None:
    if not scripted:
        from tests.tiny import make_model  # torch takes seconds to load

        make_model(folder)
        return
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    (folder / "model.safetensors").write_bytes(bytes(4096))
