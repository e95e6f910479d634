"""The whole server as real processes, with short times: what `grpo up` starts, for tests that live through a whole job.

`live_stack(directory)` gives Valkey, SQLite, API, dispatcher and a worker; the engine is the real one, on a tiny random model that
jobs name "tiny". Nothing is restarted by itself: tests kill and start parts through `stack.children`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from api.client import Grpo
from api.embedded.stack import Stack
from jobs.settings import Settings
from tests.tiny import make_model
from worker.processes import engine_processes

T = TypeVar("T")

SHORT_TIMES: dict[str, Any] = {
    "poll_s": 0.1, "heartbeat_s": 0.5, "lease_ttl_s": 3.0, "lost_after_s": 6.0, "republish_after_s": 3.0, "cancel_grace_s": 3.0,
    "drain_grace_s": 30.0, "retry_backoff_s": 0.2, "file_check_s": 0.5, "redis_timeout_s": 2.0, "min_free_bytes": 2**20,
}  # fmt: skip
MODEL = "tiny"


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Poll until the condition holds and return what it answered."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
    return answer


class LiveStack:
    """A running server and a client of it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.settings = stack.settings
        self.data_dir = stack.settings.data_dir
        self.url = stack.url
        self.client = Grpo(stack.url, patience_s=20.0)

    def kill(self, name: str) -> None:
        """SIGKILL a part: valkey, api, dispatcher or worker."""
        self.stack.children[name].kill()

    def restart(self, name: str) -> None:
        """Start a part again, on the same port and files."""
        self.stack.children[name].start()

    def attempt_dir(self, job_id: str, epoch: int = 1) -> Path:
        """Where an attempt writes."""
        return self.data_dir / "jobs" / job_id / "attempts" / str(epoch)

    def engines(self, job_id: str | None = None) -> list[psutil.Process]:
        """Living engine processes of this server, of one job or of all."""
        mine = self.data_dir / "jobs"
        return [
            process for process, badge in engine_processes() if Path(badge.run_dir).is_relative_to(mine) and job_id in (None, badge.job_id)
        ]

    def steps(self, job_id: str) -> list[int]:
        """Steps the database has, in order."""
        return [row.step for row in self.client.metrics(job_id)]

    def upload(self, rows: int = 32) -> str:
        """A training file of small sums."""
        path = self.data_dir / "sums.jsonl"
        lines = ({"prompt": f"{n}+{n}=", "reference_answer": str(2 * n)} for n in range(1, rows + 1))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.client.upload(path).id


def job_spec(training_file: str, *, num_steps: int = 3, **grpo: Any) -> dict[str, Any]:
    """A job that takes the tiny model a fraction of a second a step; `grpo` overrides parts of `method.grpo`."""
    settings: dict[str, Any] = {
        "beta": 0.04,
        "sampling": {"group_size": 4, "prompts_per_step": 2, "max_completion_tokens": 8},
        "optimizer": {"learning_rate": 1e-4},
        "grader": {"type": "regex", "pattern": "[0-9]"},
        "checkpoints": {"resume_every": 2},
        "limits": {"num_steps": num_steps},
        "resources": {"device": "cpu", "precision": "fp32"},
    }
    return {"model": MODEL, "training_file": training_file, "method": {"type": "grpo", "grpo": {**settings, **grpo}}}


@contextmanager
def live_stack(directory: Path, **overrides: Any) -> Iterator[LiveStack]:
    """A server of its own below `directory`. Call it from the main thread. Afterwards no process of it is left."""
    models = directory / "models"
    make_model(models / MODEL)
    settings = Settings(data_dir=directory / "data", port=0, model_dir=models, **{**SHORT_TIMES, **overrides}).resolved()
    stack = Stack(settings, say=print)
    stack.start()
    live = LiveStack(stack)
    try:
        yield live
    finally:
        live.client.close()
        stack.stop()
        assert live.engines() == []
