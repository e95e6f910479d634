"""Redis: the live tail of events, commands, leases, heartbeats. Transport only; every call is bounded in time.

A Redis that is down, frozen, full or read-only raises `Unavailable`; nothing here hangs or retries on its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from grpo_engine.contract.command import Command
from jobs import keys
from jobs.livetail import AsyncLive, StreamEntry, answers, client_options, entries_of
from jobs.settings import Settings

__all__ = ["MAX_NUMBER", "SUPERVISOR_COMMANDS", "AsyncLive", "Lease", "Live", "Published", "StreamEntry", "WantedNote"]

MAX_NUMBER = 2**53
"""Largest epoch and seq: exact in every JSON reader, and far from where a stream id would wear out."""
SUPERVISOR_COMMANDS = 2**40
"""Commands from this number on are a supervisor's own (pause, drain); the ledger counts from 1."""

Published = Literal["appended", "duplicate", "fenced"]


@dataclass(frozen=True)
class WantedNote:
    """The job's current epoch and what it shall do. An attempt of a lower epoch is fenced."""

    epoch: int
    wanted: str
    """run, pause, cancel or requeue."""


@dataclass(frozen=True)
class Lease:
    """Who looks after a job's attempt."""

    worker: str
    epoch: int


class Live:
    """The synchronous side, for dispatcher, supervisor and API threads. Safe to share between threads."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        self._settings = settings

    @classmethod
    def connect(cls, settings: Settings) -> Live:
        """A client with its own pool; connects on first use."""
        client = redis.Redis.from_url(settings.redis_url, retry=Retry(NoBackoff(), 0), **client_options(settings))
        return cls(client, settings)

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()

    def ping(self) -> None:
        """Raises Unavailable unless Redis accepts writes."""
        with answers():
            self._redis.set(keys.PING, "1", ex=keys.DAY_S)

    # Events

    def publish_event(self, job_id: str, event_json: str, epoch: int, seq: int) -> Published:
        """Append an event. `duplicate`: it is there already. `fenced`: a newer attempt has written; stop.

        Raises ValueError for numbers outside 1..2^53, which would brick the stream.
        """
        if not (1 <= epoch <= MAX_NUMBER and 1 <= seq <= MAX_NUMBER):
            raise ValueError(f"event number {epoch}-{seq} is outside 1..2^53")
        key = keys.events(job_id)
        with answers():
            try:
                pipe = self._redis.pipeline(transaction=False)
                pipe.xadd(key, {"event": event_json}, id=f"{epoch}-{seq}", maxlen=self._settings.stream_maxlen, approximate=True)
                pipe.expire(key, self._ttl)
                pipe.execute()
                return "appended"
            except ResponseError as error:
                if "equal or smaller" not in str(error):
                    raise
                last = str(cast(Mapping[str, Any], self._redis.xinfo_stream(key))["last-generated-id"])
        return "fenced" if int(last.partition("-")[0]) > epoch else "duplicate"

    def read_stream(self, job_id: str, after_id: str = "0-0", block_ms: int = 0, count: int = 1000) -> list[StreamEntry]:
        """Entries after an id, oldest first; waits up to `block_ms` (0 = not at all) for the first."""
        return self.read_streams({job_id: after_id}, block_ms, count).get(job_id, [])

    def read_streams(self, after: Mapping[str, str], block_ms: int = 0, count: int = 1000) -> dict[str, list[StreamEntry]]:
        """The same for many jobs in one call: `after` is job id -> last id seen. Jobs without news are absent."""
        if not after:
            return {}
        by_key = {keys.events(job_id): job_id for job_id in after}
        block = min(block_ms, int(self._settings.redis_timeout_s * 500)) or None
        with answers():
            answer = self._redis.xread({key: after[job_id] for key, job_id in by_key.items()}, count=count, block=block)
        return {by_key[key]: entries for key, entries in entries_of(answer)}

    def stream_floor(self, job_id: str) -> str | None:
        """Id of the oldest entry the stream still holds; None when it holds none."""
        with answers():
            oldest = cast(list[tuple[str, Any]], self._redis.xrange(keys.events(job_id), count=1))
        return oldest[0][0] if oldest else None

    # Attempts

    def put_dispatch(self, job_id: str, epoch: int, dispatch_json: str) -> None:
        """Leave what the attempt needs for whoever claims it."""
        with answers():
            self._redis.set(keys.dispatch(job_id, epoch), dispatch_json, ex=self._ttl)

    def get_dispatch(self, job_id: str, epoch: int) -> str | None:
        """What the attempt needs; None when Redis was wiped meanwhile (the dispatcher puts it back)."""
        with answers():
            return cast(str | None, self._redis.get(keys.dispatch(job_id, epoch)))

    def set_wanted(self, job_id: str, epoch: int, wanted: str) -> None:
        """Tell the attempt what it shall do, and older attempts that they are fenced."""
        with answers():
            self._redis.set(keys.wanted(job_id), json.dumps({"epoch": epoch, "wanted": wanted}), ex=self._ttl)

    def get_wanted(self, job_id: str) -> WantedNote | None:
        """What the job shall do; None when nothing is known (keep going)."""
        with answers():
            text = cast(str | None, self._redis.get(keys.wanted(job_id)))
        return None if text is None else WantedNote(**json.loads(text))

    def put_command(self, job_id: str, command: Command) -> None:
        """Hand a numbered command to the attempt."""
        key = keys.commands(job_id)
        with answers():
            pipe = self._redis.pipeline(transaction=False)
            pipe.hset(key, str(command.number), command.model_dump_json())
            pipe.expire(key, self._ttl)
            pipe.execute()

    def commands(self, job_id: str) -> list[Command]:
        """Commands not yet answered, by number."""
        with answers():
            raw = cast(dict[str, str], self._redis.hgetall(keys.commands(job_id)))
        return sorted((Command.model_validate_json(text) for text in raw.values()), key=lambda command: command.number)

    def drop_command(self, job_id: str, number: int) -> None:
        """The command was answered."""
        with answers():
            self._redis.hdel(keys.commands(job_id), str(number))

    def renew_lease(self, job_id: str, worker: str, epoch: int) -> bool:
        """Say that the attempt is looked after. False when a newer epoch holds the lease: this one is fenced."""
        held = self.lease(job_id)
        if held is not None and held.epoch > epoch:
            return False
        with answers():
            text = json.dumps({"worker": worker, "epoch": epoch})
            self._redis.set(keys.lease(job_id), text, px=int(self._settings.lease_ttl_s * 1000))
        return True

    def lease(self, job_id: str) -> Lease | None:
        """Who looks after the job; None when the lease ran out."""
        with answers():
            text = cast(str | None, self._redis.get(keys.lease(job_id)))
        return None if text is None else Lease(**json.loads(text))

    def release_lease(self, job_id: str, epoch: int) -> None:
        """Give the lease back if this epoch still holds it."""
        held = self.lease(job_id)
        if held is not None and held.epoch == epoch:
            with answers():
                self._redis.delete(keys.lease(job_id))

    # Workers

    def worker_heartbeat(self, worker_id: str, heartbeat: Mapping[str, Any]) -> None:
        """Publish a worker's liveness and capabilities."""
        with answers():
            pipe = self._redis.pipeline(transaction=False)
            pipe.set(keys.worker(worker_id), json.dumps(dict(heartbeat)), px=int(self._settings.lease_ttl_s * 1000))
            pipe.sadd(keys.WORKERS, worker_id)
            pipe.expire(keys.WORKERS, keys.WORKERS_TTL_S)
            pipe.execute()

    def workers(self) -> dict[str, dict[str, Any]]:
        """Live workers: id -> heartbeat."""
        with answers():
            ids = sorted(cast(set[str], self._redis.smembers(keys.WORKERS)))
            if not ids:
                return {}
            texts = cast(list[str | None], self._redis.mget([keys.worker(worker_id) for worker_id in ids]))
            gone = [worker_id for worker_id, text in zip(ids, texts, strict=True) if text is None]
            if gone:
                self._redis.srem(keys.WORKERS, *gone)
        return {worker_id: json.loads(text) for worker_id, text in zip(ids, texts, strict=True) if text is not None}

    def dispatcher_heartbeat(self, heartbeat: Mapping[str, Any]) -> None:
        """Publish that a dispatcher turns."""
        with answers():
            self._redis.set(keys.DISPATCHER, json.dumps(dict(heartbeat)), px=int(self._settings.lease_ttl_s * 1000))

    def dispatcher(self) -> dict[str, Any] | None:
        """The latest dispatcher's sign of life; None when none has turned for one lease time."""
        with answers():
            text = cast(str | None, self._redis.get(keys.DISPATCHER))
        return None if text is None else dict(json.loads(text))

    def remove_worker(self, worker_id: str) -> None:
        """The worker ended in good order."""
        with answers():
            self._redis.delete(keys.worker(worker_id))
            self._redis.srem(keys.WORKERS, worker_id)

    # Notices

    def post_notice(self, notice_json: str) -> None:
        """Leave a word for a job's history. The oldest go when nobody takes them."""
        with answers():
            pipe = self._redis.pipeline(transaction=False)
            pipe.rpush(keys.NOTICES, notice_json)
            pipe.ltrim(keys.NOTICES, -keys.MAX_NOTICES, -1)
            pipe.expire(keys.NOTICES, keys.DAY_S)
            pipe.execute()

    def take_notice(self) -> str | None:
        """Take the oldest word that workers have left: each goes to one caller. None when there is none."""
        with answers():
            return cast(str | None, self._redis.lpop(keys.NOTICES))

    # Rates

    def add_spending(self, spent: Mapping[str, int], minute: int) -> dict[str, tuple[int, int]]:
        """Add to the requests let through for each key or address in this minute since 1970; then what all processes let through
        in it, and in the minute before."""
        with answers():
            pipe = self._redis.pipeline(transaction=False)
            for who, number in spent.items():
                pipe.incrby(keys.rate(who, minute), number)
                pipe.expire(keys.rate(who, minute), keys.RATE_TTL_S)
                pipe.get(keys.rate(who, minute - 1))
            found = pipe.execute()
        return {who: (int(now), int(before or 0)) for who, now, before in zip(spent, found[::3], found[2::3], strict=True)}

    # Generation and queues

    def generation(self) -> str | None:
        """The mark that tells a wiped Redis from the one we knew."""
        with answers():
            return cast(str | None, self._redis.get(keys.GENERATION))

    def set_generation(self, generation: str) -> None:
        """Write or renew the mark."""
        with answers():
            self._redis.set(keys.GENERATION, generation, ex=keys.GENERATION_TTL_S)

    def queued_messages(self, queue: str, limit: int = 10_000) -> list[str]:
        """Raw Celery messages waiting in a queue, for the dispatcher to see what needs no second message."""
        with answers():
            return cast(list[str], self._redis.lrange(f"{keys.PREFIX}{queue}", 0, limit - 1))

    @property
    def _ttl(self) -> int:
        return max(1, int(self._settings.stream_ttl_s))
