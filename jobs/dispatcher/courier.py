"""Webhooks out of the dispatcher: deliveries are planned and claimed in the turn, sent by threads beside it.

A subscriber that hangs, lies or is gone costs one of a few threads at most 10 s a try; the turn never waits for one. What a
killed dispatcher had claimed is claimed again when its hold is over, so a subscriber may hear an event twice, with the same id.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from grpo_engine.contract.error import GrpoError
from jobs.database import DatabaseDamaged
from jobs.ledger import Ledger
from jobs.ledger.deliveries import DeliveryRecord, NewDelivery
from jobs.ledger.records import EventRecord
from jobs.ledger.webhooks import EndpointRecord
from jobs.settings import Settings
from jobs.webhooks.events import EVENT_TYPES, TYPE_OF, body_of, event_id, is_told
from jobs.webhooks.sender import TIMEOUT_S, Sender, Sent

THREADS = 4
HOLD_S = 6 * TIMEOUT_S
LONGEST_PAUSE_S = 6 * 3600.0
KEPT_S = 30 * 86400.0
"""The log of finished deliveries."""
FORGET_EVERY_S = 3600.0

log = logging.getLogger(__name__)


class Courier:
    """Carries events to subscribers."""

    def __init__(
        self, ledger: Ledger, settings: Settings, monotonic: Callable[[], float] = time.monotonic, sender: Sender | None = None
    ) -> None:
        self._ledger = ledger
        self._settings = settings
        self._monotonic = monotonic
        self._sender = sender or Sender(allow_private=settings.webhook_allow_private)
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="courier")
        self._lock = threading.Lock()
        self._under_way = 0
        self._forget_at = monotonic() + FORGET_EVERY_S

    def turn(self) -> None:
        """Plan what is new, and hand what is due to free threads. Raises what the database raises."""
        endpoints = {endpoint.id: endpoint for endpoint in self._ledger.endpoints()}
        if not endpoints:
            return
        subscribers = list(endpoints.values())
        self._ledger.plan_deliveries(subscribers, EVENT_TYPES.values(), lambda event: plan(event, subscribers))
        with self._lock:
            free = THREADS - self._under_way
        for delivery in self._ledger.claim_deliveries(free, HOLD_S) if free > 0 else ():
            endpoint = endpoints.get(delivery.endpoint_id)
            if endpoint is None:  # deleted, or made since: the hold ends by itself
                continue
            with self._lock:
                self._under_way += 1
            self._pool.submit(self._carry, endpoint, delivery)
        if self._monotonic() >= self._forget_at:
            self._forget_at = self._monotonic() + FORGET_EVERY_S
            self._ledger.forget_deliveries(self._ledger.clock() - KEPT_S)

    def close(self) -> None:
        """Wait for what is under way, at most one try."""
        self._pool.shutdown(cancel_futures=True)

    def _carry(self, endpoint: EndpointRecord, delivery: DeliveryRecord) -> None:
        try:
            attempt(self._ledger, self._sender, endpoint, delivery, self._settings)
        except (GrpoError, DatabaseDamaged, OSError) as error:
            log.warning("delivery %s: %s; it is tried again", delivery.id, error)
        except Exception:
            log.exception("delivery %s: a defect; it is tried again", delivery.id)
        finally:
            with self._lock:
                self._under_way -= 1


def plan(event: EventRecord, subscribers: Sequence[EndpointRecord]) -> list[NewDelivery]:
    """One delivery for each subscriber who asked for this type and was there when it happened."""
    if not is_told(event):
        return []
    name = TYPE_OF[event.type]
    asked = [endpoint for endpoint in subscribers if name in endpoint.event_types and endpoint.created_at <= event.time]
    body = body_of(event) if asked else ""
    return [NewDelivery(endpoint.id, event.number, event_id(event), name, body) for endpoint in asked]


def attempt(ledger: Ledger, sender: Sender, endpoint: EndpointRecord, delivery: DeliveryRecord, settings: Settings) -> DeliveryRecord:
    """One try, and what follows from it."""
    sent = sender.send(endpoint.url, delivery.event_id, delivery.body, endpoint.keys(ledger.clock()))
    tries = delivery.tries + 1
    now = ledger.clock()
    if sent.is_delivered:
        return ledger.record_try(delivery.id, status="delivered", status_code=sent.status_code, error=None, next_try_at=now)
    is_over = sent.is_final or tries >= settings.webhook_max_tries
    log.info("delivery %s to %s, try %d: %s", delivery.id, endpoint.id, tries, sent.error)
    return ledger.record_try(
        delivery.id, status="failed" if is_over else "pending", status_code=sent.status_code, error=sent.error,
        next_try_at=now if is_over else now + pause_s(tries, sent, settings),
    )  # fmt: skip


def pause_s(tries: int, sent: Sent, settings: Settings) -> float:
    """Until the next try: five times longer each time, up to 6 h, a fifth of it by chance, and as long as the subscriber asked."""
    planned = min(LONGEST_PAUSE_S, settings.webhook_retry_s * 5.0 ** (tries - 1)) * random.uniform(0.8, 1.0)
    return max(planned, min(sent.retry_after_s or 0.0, LONGEST_PAUSE_S))
