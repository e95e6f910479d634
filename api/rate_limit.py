"""How many requests a minute a key may send: a token bucket for each, in memory, shared between API processes through Redis.

A request is decided in memory and never waits for Redis. What a process lets through is added to a counter of the minute in Redis, and
what the others added is taken out of its own bucket, four times a second while requests come; so several processes together may exceed
the limit by what comes in a quarter of a second. While Redis does not answer each process counts for itself: the limit is then that of
each process, and no request is refused for want of Redis.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from grpo_engine.contract.error import RateLimited, Unavailable
from jobs.live import Live

logger = logging.getLogger("grpo.api")

_SHARE_S = 0.25
"""Between two exchanges with Redis."""
_MAX_BUCKETS = 10_000
"""Kept at most; those not used for longest go first, and come back full."""


@dataclass
class _Bucket:
    """Tokens left at a time, and what Redis knows of it."""

    level: float
    at: float
    unshared: int = 0
    """Let through since the last exchange."""
    minute: int = -1
    """Of the last exchange; -1 before the first."""
    known: int = 0
    """What all processes had let through in that minute."""
    is_touched: bool = True


@dataclass(frozen=True)
class Allowance:
    """What is left after a request."""

    limit: int
    remaining: int
    reset_s: float
    """Until the bucket is full again."""
    wait_s: float
    """Until the next request is let through; 0 when this one was."""

    def headers(self) -> dict[str, str]:
        """As OpenAI spells them."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.reset_s:.3g}s",
        }


class RateLimit:
    """Token buckets of one size. Thread-safe."""

    def __init__(self, live: Live, per_minute: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._limit = per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._is_degraded = False

    def take(self, who: str) -> Allowance | None:
        """Take a token; `wait_s` is above 0 when there was none. None: there is no limit."""
        if not self._limit:
            return None
        per_s = self._limit / 60
        with self._lock:
            bucket, now = self._bucket(who), self._clock()
            bucket.level = min(float(self._limit), bucket.level + (now - bucket.at) * per_s)
            bucket.at, bucket.is_touched = now, True
            wait_s = max(0.0, (1 - bucket.level) / per_s)
            if wait_s == 0:
                bucket.level -= 1
                bucket.unshared += 1
            allowance = Allowance(self._limit, max(0, int(bucket.level)), (self._limit - bucket.level) / per_s, wait_s)
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._share_while_used, name="rate-limit", daemon=True)
                self._thread.start()
        return allowance

    def close(self) -> None:
        """End the exchange with Redis."""
        self._closing.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _bucket(self, who: str) -> _Bucket:
        bucket = self._buckets.get(who)
        if bucket is None:
            bucket = self._buckets[who] = _Bucket(float(self._limit), self._clock())
            if len(self._buckets) > _MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(who)
        return bucket

    def _share_while_used(self) -> None:
        """The thread: lives while there is something to exchange."""
        while True:
            with self._lock:
                touched = {who: bucket for who, bucket in self._buckets.items() if bucket.is_touched}
                if not touched or self._closing.is_set():
                    self._thread = None
                    return
                spent = {who: bucket.unshared for who, bucket in touched.items()}
                for bucket in touched.values():
                    bucket.unshared, bucket.is_touched = 0, False
            self._share(touched, spent)
            self._closing.wait(_SHARE_S)

    def _share(self, touched: dict[str, _Bucket], spent: dict[str, int]) -> None:
        now = time.time()
        minute = int(now // 60)
        try:
            counts = self._live.add_spending(spent, minute)
        except Unavailable as error:
            if not self._is_degraded:
                logger.warning("requests are counted by this process alone: %s", error)
            self._is_degraded = True
            with self._lock:
                for who, bucket in touched.items():
                    bucket.unshared += spent[who]
            return
        self._is_degraded = False
        with self._lock:
            for who, bucket in touched.items():
                current, before = counts[who]
                if bucket.minute < minute - 1:  # the first look in a while: as if what the last 60 s saw were all still missing
                    bucket.level = min(bucket.level, self._limit - current - before * (1 - now % 60 / 60))
                else:
                    others = current + (before if bucket.minute < minute else 0) - bucket.known - spent[who]
                    bucket.level -= max(0, others)  # below 0 when Redis was emptied
                bucket.minute, bucket.known = minute, current


def refuse(allowance: Allowance, whose: str) -> RateLimited:
    """The error for a request that found no token."""
    wait = max(1, math.ceil(allowance.wait_s))
    message = f"{whose} has sent more than {allowance.limit} requests a minute; wait {wait} s"
    return RateLimited(message, param="authorization", headers={"retry-after": str(wait), **allowance.headers()})


def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((parsed, 64), strict=False))
