"""`python -m worker`: one Celery worker process, prefork, one pool child a slot, one attempt a child."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import signals

from grpo_engine.contract.error import GrpoError
from jobs.artifacts import Artifacts
from jobs.live import Live
from jobs.otel import require_extra
from jobs.queue import make_app
from jobs.settings import Settings, SettingsError
from worker.attempt import Attempt
from worker.broker import use_careful_broker
from worker.capabilities import capabilities, served_queues
from worker.drain import DRAIN
from worker.engine import ENGINE_COMMAND
from worker.hearing import Hearing
from worker.heartbeat import Heartbeat
from worker.janitor import close_attempt, sweep
from worker.probe import PROBE_COMMAND, close_lost_probe, register_probe
from worker.probe_place import sweep_probes
from worker.tasks import default_worker_id, register

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(engine_command: Sequence[str] = ENGINE_COMMAND, probe_command: Sequence[str] = PROBE_COMMAND) -> None:
    """Run until SIGTERM. A running job is drained: it ends its step, saves, and is queued again."""
    try:
        settings = Settings.from_env()
        require_extra(settings)
    except SettingsError as error:
        sys.exit(f"grpo worker: {error}")
    logging.basicConfig(level=settings.log_level, format=LOG_FORMAT, stream=sys.stderr)
    settings = dataclasses.replace(settings, queues=served_queues(settings.queues))
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    worker_id = settings.worker_id or default_worker_id()
    artifacts = Artifacts(settings.data_dir)
    sweep(artifacts, settings.cancel_grace_s)
    sweep_probes(artifacts)
    use_careful_broker()
    app = make_app(settings)
    register(app, settings, worker_id, engine_command)
    register_probe(app, settings, worker_id, probe_command)
    live = Live.connect(settings)
    heartbeat = Heartbeat(live, worker_id, settings.heartbeat_s, lambda: description(settings))
    hearing = Hearing(live, settings.queues, settings.deaf_after_s)
    handlers = Handlers(artifacts, settings, heartbeat, hearing)
    handlers.connect()
    try:
        app.worker_main(arguments(settings, worker_id))
    finally:
        hearing.stop()
        heartbeat.stop()
        live.close()
        if hearing.is_deaf:
            os.execv(sys.executable, sys.orig_argv)


def description(settings: Settings) -> dict[str, Any]:
    """What the heartbeat says besides the time."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "queues": list(settings.queues),
        "slots": settings.slots,
        **capabilities(settings.model_dir),
    }


def arguments(settings: Settings, worker_id: str) -> list[str]:
    """Celery's command line."""
    return [
        "--quiet",
        "worker",
        "--pool=prefork",
        f"--concurrency={settings.slots}",
        f"--queues={','.join(settings.queues)}",
        f"--hostname={worker_id}",
        f"--loglevel={settings.log_level}",
        "--without-mingle",
        "--without-gossip",
    ]


class Handlers:
    """What this process does at Celery's signals. They must outlive `connect`: Celery keeps weak references."""

    def __init__(self, artifacts: Artifacts, settings: Settings, heartbeat: Heartbeat, hearing: Hearing) -> None:
        self._artifacts = artifacts
        self._settings = settings
        self._heartbeat = heartbeat
        self._hearing = hearing

    def connect(self) -> None:
        """Listen."""
        signals.worker_ready.connect(self.on_ready)
        signals.worker_shutting_down.connect(self.on_shutting_down)
        signals.task_failure.connect(self.on_failure)

    def on_ready(self, sender: Any, **_: Any) -> None:
        """The consumer is connected: tell the world, and let its timer prove that it turns."""
        sender.timer.call_repeatedly(self._settings.heartbeat_s, self._heartbeat.poll)
        self._heartbeat.start()
        self._hearing.start()

    def on_shutting_down(self, **_: Any) -> None:
        """Inside a signal handler: only set the flag the pool children look at."""
        DRAIN.set()

    def on_failure(self, exception: BaseException, args: Sequence[Any], **_: Any) -> None:
        """A pool child that died at work leaves no verdict: end its engine and write one, off the event loop."""
        if isinstance(exception, WorkerLostError) and len(args) == 2:
            threading.Thread(target=self._close, args=(str(args[0]), int(args[1])), name="close-lost-attempt").start()
        elif isinstance(exception, WorkerLostError) and len(args) == 1:
            threading.Thread(target=close_lost_probe, args=(self._settings, str(args[0])), name="close-lost-probe").start()

    def _close(self, job_id: str, epoch: int) -> None:
        try:
            attempt = Attempt(self._artifacts, job_id, epoch)
        except GrpoError as error:
            log.error("a message named no job of ours: %s", error)
            return
        supervisor = attempt.supervisor()
        if supervisor is not None and not supervisor.is_alive():
            close_attempt(attempt, self._settings.cancel_grace_s)


if __name__ == "__main__":
    main()
