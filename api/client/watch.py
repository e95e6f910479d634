"""Follow a job on a terminal: its steps and its events, merged as they come, above a bar and the curves of KL, beta and reward."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from api.client.display import QUIET_EVENTS, event_line, step_line
from api.client.gauge import Gauge
from api.client.sse import ServerEvent
from api.client.sync import Grpo
from grpo_engine.contract.view import Job


class Follower:
    """Prints a job's life until it ends. `stop` may be called from another thread."""

    def __init__(self, client: Grpo, job: Job, console: Console) -> None:
        self._client = client
        self._job = job
        self._console = console
        self._queue: queue.Queue[ServerEvent | BaseException | None] = queue.Queue()
        self._is_stopped = threading.Event()
        kl = job.resolved.get("kl", {})
        self._estimator = str(kl.get("estimator", "k3"))
        self._gauge = Gauge(job.progress.num_steps, self._estimator, console.encoding)

    def stop(self) -> None:
        """Let `follow` return."""
        self._is_stopped.set()
        self._queue.put(None)

    def follow(self) -> Job:
        """Print until the job has ended; returns the job as it is then. Raises what the streams raised."""
        readers = [
            threading.Thread(target=self._read, args=(stream, self._job.id), daemon=True)
            for stream in (self._client.stream_events, self._client.stream_metrics)
        ]
        for reader in readers:
            reader.start()
        if self._console.is_terminal:
            with Live(self._gauge, console=self._console, refresh_per_second=4, transient=True):
                self._print(len(readers))
        else:
            self._print(len(readers))
        return self._client.job(self._job.id)

    def _print(self, streams: int) -> None:
        ended = 0
        while ended < streams and not self._is_stopped.is_set():
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                ended += 1
            elif (line := self._line(item)) is not None:
                self._console.print(line, soft_wrap=True, highlight=False)

    def _read(self, stream: Callable[[str], Iterator[ServerEvent]], job_id: str) -> None:
        try:
            for event in stream(job_id):
                if self._is_stopped.is_set():
                    return
                self._queue.put(event)
            self._queue.put(None)
        except Exception as error:  # noqa: BLE001 - handed over to the thread that follows
            self._queue.put(error)

    def _line(self, event: ServerEvent) -> Text | None:
        data: dict[str, Any] = event.data
        if event.type == "run.rewound" and "to_step" in data:
            self._gauge.rewind(int(data["to_step"]))
        if event.type == "step.completed" and "metrics" in data:
            self._gauge.add(data["step"], data["metrics"])
            return step_line(data["step"], self._job.progress.num_steps, data["metrics"], self._estimator, self._console.width)
        if "level" not in data or event.type in QUIET_EVENTS:
            return None
        return event_line(event.type, data["level"], data["message"], data["created_at"])
