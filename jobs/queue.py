"""The Celery application and the one thing the bookkeeper sends through it: a hint that (job, epoch) waits to be claimed.

Early acknowledgement, no results, no ETA, no canvas, no revoke: the claim file decides who runs, and the dispatcher
publishes again what nobody claimed. Tasks are named by string, so importing this loads nothing heavy.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import RedisError

from grpo_engine.contract.error import Unavailable
from jobs import keys
from jobs.settings import Settings
from jobs.traces import HEADER, TraceContext

RUN_ATTEMPT = "grpo.run_attempt"
"""Task (job_id, epoch)."""
RUN_PROBE = "grpo.probe"
"""Task (probe_id,)."""
PROBE_MESSAGE_TTL_S = 300.0
"""A probe's message older than this is dropped by the worker; its order is long withdrawn. Wide, because clocks differ."""
CPU_QUEUE = "grpo-cpu"
GPU_QUEUE = "grpo-gpu"

log = logging.getLogger(__name__)


def make_app(settings: Settings, *, socket_timeout_s: float = 15.0) -> Celery:
    """The Celery application of worker and dispatcher, every setting that matters stated."""
    app = Celery("grpo", broker=settings.redis_url, backend=None)
    app.conf.update(
        task_acks_late=False,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_serializer="json",
        accept_content=["json"],
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        task_reject_on_worker_lost=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_max_tasks_per_child=1,
        worker_send_task_events=False,
        worker_enable_remote_control=True,
        worker_hijack_root_logger=False,
        broker_connection_retry=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=settings.redis_connect_timeout_s,
        task_publish_retry=False,
        task_default_queue=CPU_QUEUE,
        task_create_missing_queues=True,
        task_time_limit=None,
        task_soft_time_limit=None,
        timezone="UTC",
        enable_utc=True,
        broker_transport_options={
            "visibility_timeout": 30 * keys.DAY_S,
            "socket_timeout": socket_timeout_s,
            "socket_connect_timeout": settings.redis_connect_timeout_s,
            "socket_keepalive": True,
            "health_check_interval": 15,
            "global_keyprefix": keys.PREFIX,
        },
    )
    return app


def task_id(job_id: str, epoch: int) -> str:
    """The Celery id of an attempt's message; the same for each re-publication, so that it can be found in the queue."""
    return f"{job_id}:{epoch}"


class Publisher:
    """Sends hints. One per process. A publication takes seconds when the broker is away: never on an event loop, and in a request
    only where the request is about the worker itself (a probe)."""

    def __init__(self, settings: Settings) -> None:
        self._app = make_app(settings, socket_timeout_s=settings.redis_timeout_s)

    def enqueue(self, job_id: str, epoch: int, queue: str = CPU_QUEUE, trace: TraceContext | None = None) -> None:
        """Publish (job_id, epoch), and in a header the span the attempt belongs to. Bounded in time; raises Unavailable when the broker
        does not take it."""
        headers = {} if trace is None else {HEADER: str(trace)}
        self._send(RUN_ATTEMPT, [job_id, epoch], task_id(job_id, epoch), queue, headers=headers)

    def ask_probe(self, probe_id: str, queue: str) -> None:
        """Publish that a probe's order waits. Bounded in time; raises Unavailable when the broker does not take it."""
        self._send(RUN_PROBE, [probe_id], probe_id, queue, expires=PROBE_MESSAGE_TTL_S)

    def _send(self, task: str, args: list[Any], message_id: str, queue: str, **options: Any) -> None:
        try:
            with self._app.connection_for_write(transport_options=self._app.conf.broker_transport_options) as connection:
                connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, reraise_as_library_errors=True)
                with connection.Producer(serializer="json") as producer:
                    self._app.send_task(
                        task, args=args, task_id=message_id, queue=queue, producer=producer, retry=False, ignore_result=True, **options
                    )
        except (BrokerError, RedisError, OSError) as error:
            raise Unavailable(f"the broker does not take messages: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the application's pools."""
        self._app.close()


def queue_of(gpus: int) -> str:
    """The queue of a job that asks for so many GPUs."""
    return GPU_QUEUE if gpus > 0 else CPU_QUEUE


def message_ids(messages: list[str]) -> set[str]:
    """Celery ids of raw messages; what is not one of ours is left out (the worker discards it)."""
    found: set[str] = set()
    for message in messages:
        try:
            headers: Any = json.loads(message)["headers"]
            found.add(str(headers["id"]))
        except (ValueError, KeyError, TypeError):
            log.warning("a message in the queue is not one of ours: %.80r", message)
    return found
