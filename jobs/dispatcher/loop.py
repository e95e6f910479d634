"""The dispatcher process: one turn after another until SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from grpo_engine.contract.error import GrpoError, Unavailable
from jobs.database import DatabaseDamaged
from jobs.dispatcher.courier import Courier
from jobs.dispatcher.intake import Intake
from jobs.dispatcher.mirror import Mirror
from jobs.dispatcher.notices import take_notices
from jobs.dispatcher.outbox import Outbox
from jobs.dispatcher.reaper import Reaper
from jobs.dispatcher.retention import Retention
from jobs.dispatcher.stall import StallWatch
from jobs.dispatcher.watch import RedisWatch
from jobs.exporters.job_spans import JobSpans
from jobs.exporters.mlflow import MlflowExporter
from jobs.ledger import JobRecord, Ledger, open_ledger
from jobs.ledger.attempts import LIVE_STATES
from jobs.lifecycle import State
from jobs.live import Live
from jobs.otel import Otel
from jobs.queue import Publisher
from jobs.rebuild import refuse_emptied
from jobs.settings import Settings, SettingsError

RETENTION_EVERY_S = 30.0
SWEPT_AT_START = 200
"""Finished jobs looked at once, newest first, in case the last dispatcher ended before it had retired their checkpoints."""

log = logging.getLogger(__name__)


class Dispatcher:
    """One control loop. `turn()` may be called at any rate, by any number of processes."""

    def __init__(self, ledger: Ledger, live: Live, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._live = live
        self._settings = settings
        self._monotonic = monotonic
        self.watch = RedisWatch(ledger, live, settings, monotonic)
        self._intake = Intake(ledger, live, settings, monotonic)
        self._mirror = Mirror(ledger, live, settings, self.watch, monotonic)
        self._spans = JobSpans(ledger, Otel.open(settings, "grpo-dispatcher"), monotonic)
        self._outbox = Outbox(ledger, live, Publisher(settings), settings, self._intake, self.watch, self._spans, monotonic)
        self._reaper = Reaper(ledger, live, settings, self._intake, self.watch, monotonic)
        self._retention = Retention(ledger)
        self._courier = Courier(ledger, settings, monotonic)
        self._mlflow = MlflowExporter(ledger, settings, monotonic)
        self._stall = StallWatch(ledger, settings, monotonic)
        self._to_sweep: dict[str, float] | None = None
        self._complaints: dict[str, str] = {}
        self._stop = threading.Event()

    @classmethod
    def open(cls, settings: Settings) -> Dispatcher:
        """With a ledger and a Redis client of its own. Raises DatabaseDamaged, also for a database that lost its jobs."""
        ledger = open_ledger(settings)
        refuse_emptied(ledger)
        return cls(ledger, Live.connect(settings), settings)

    def run(self) -> None:
        """Turn until `stop()`. An outage of Redis or the database is logged and waited out."""
        log.info("dispatcher: ready")
        while not self._stop.is_set():
            self._guard("the turn", self.turn)
            self._stop.wait(self._settings.poll_s)
        log.info("dispatcher: stopped")

    def stop(self) -> None:
        """End after the current turn; safe in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Let go of everything."""
        self._courier.close()
        self._mlflow.close()
        self._spans.close()
        self._outbox.close()
        self._live.close()
        self._ledger.close()

    def turn(self) -> None:
        """Look round once."""
        redis_is_up = self.watch.look()
        active = self._ledger.jobs_in(LIVE_STATES)
        news = self._intake.read_streams(active) if redis_is_up else {}
        for job in active:
            self._guard(job.id, partial(self._intake.take, job, news.get(job.id, []), redis_is_up=redis_is_up))
        if redis_is_up:
            active = self._ledger.jobs_in(LIVE_STATES)
            self._guard("wanted notes", lambda: self._mirror.sync(active))
            self._guard("publication", lambda: self._outbox.chase(active))
            self._guard("workers' notices", lambda: take_notices(self._ledger, self._live))
            self._guard("the reaper", lambda: self._reaper.look(active))
            for job in self._ledger.jobs_in([State.QUEUED]):
                self._guard(job.id, partial(self._outbox.dispatch, job))
        self._guard("the stall watch", lambda: self._stall.look(active))
        self._guard("webhooks", self._courier.turn)
        self._guard("MLflow", self._mlflow.turn)
        self._guard("OpenTelemetry", self._spans.turn)
        self._intake.forget(active)
        self._retire(active)

    def _retire(self, active: list[JobRecord]) -> None:
        """Sweep jobs with an attempt now and then, and once more after they ended."""
        now = self._monotonic()
        if self._to_sweep is None:
            finished = self._ledger.list_jobs(states=[state for state in State if state.is_terminal], limit=SWEPT_AT_START)
            self._to_sweep = {job.id: now for job in finished.data}
        for job in active:
            self._to_sweep.setdefault(job.id, now)
        running = {job.id for job in active}
        for job_id in [job_id for job_id, due in self._to_sweep.items() if due <= now or job_id not in running]:
            self._guard(job_id, partial(self._sweep, job_id))
            if job_id in running:
                self._to_sweep[job_id] = now + RETENTION_EVERY_S
            else:
                del self._to_sweep[job_id]

    def _sweep(self, job_id: str) -> None:
        self._retention.sweep(self._ledger.get_job(job_id))

    def _guard(self, subject: str, work: Callable[[], None]) -> None:
        """One job's trouble is logged, once while it lasts, and stops nobody else."""
        try:
            work()
        except (GrpoError, OSError, DatabaseDamaged) as error:
            self._complain(subject, f"{type(error).__name__}: {error}")
        except Exception as error:
            if self._complaints.get(subject) != repr(error):
                log.exception("%s: a defect; it is tried again", subject)
            self._complaints[subject] = repr(error)
        else:
            self._complaints.pop(subject, None)

    def _complain(self, subject: str, text: str) -> None:
        if self._complaints.get(subject) != text:
            log.warning("%s: %s", subject, text)
        self._complaints[subject] = text


def main() -> None:
    """Run with settings from the environment until SIGTERM or SIGINT."""
    try:
        settings = Settings.from_env()
    except SettingsError as error:
        sys.exit(f"grpo dispatcher: {error}")
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        dispatcher = Dispatcher.open(settings)
    except (DatabaseDamaged, SettingsError, Unavailable) as error:
        sys.exit(f"grpo dispatcher: {error}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: dispatcher.stop())
    try:
        dispatcher.run()
    finally:
        dispatcher.close()
