"""A probe's way through Redis: the order to a worker, who waits, who works, and the answer. Nothing of it reaches the database.

The order is taken by exactly one worker. The asker's mark says that somebody still waits for the answer, the runner's that
somebody works on it; each vanishes when its owner does.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import keys
from jobs.livetail import answers, client_options
from jobs.settings import Settings

PROBE_ID = re.compile(r"ftprobe-[0-9a-f]{32}")
ORDER_TTL_S = 600
"""Far more than a probe waits for a worker."""
ANSWER_TTL_S = 60


@dataclass(frozen=True)
class ProbeOrder:
    """What a worker is asked to try. Paths are relative to the data directory."""

    spec: dict[str, Any]
    paths: dict[str, str]
    """`training_file`, `validation_file`, `model_from`, `reference_from`: those there are."""
    time_limit_s: float

    def to_json(self) -> str:
        """For Redis."""
        return json.dumps({"spec": self.spec, "paths": self.paths, "time_limit_s": self.time_limit_s})

    @classmethod
    def from_json(cls, text: str) -> ProbeOrder:
        """Raises ValueError, KeyError or TypeError for what is no order."""
        content = json.loads(text)
        paths = {str(name): str(path) for name, path in content["paths"].items()}
        return cls(dict(content["spec"]), paths, float(content["time_limit_s"]))


@dataclass(frozen=True)
class ProbeAnswer:
    """What came of it: a probe (contract/probe_view.py, as JSON), or why there is none."""

    probe: dict[str, Any] | None = None
    code: str | None = None
    """The reason a job would fail with, or `probe_timeout`, `worker_lost`, `drain`, `unavailable`."""
    message: str = ""
    param: str | None = None

    def to_json(self) -> str:
        """For Redis."""
        return json.dumps({"probe": self.probe, "code": self.code, "message": self.message, "param": self.param})


@dataclass(frozen=True)
class ProbeState:
    """One look at a probe."""

    is_waiting: bool
    """No worker has taken the order."""
    is_running: bool
    """A worker says that it works on it."""
    answer: ProbeAnswer | None


class WorkerBoard:
    """The worker's side. Raises Unavailable when Redis does not answer."""

    def __init__(self, settings: Settings) -> None:
        self._redis = redis.Redis.from_url(settings.redis_url, retry=Retry(NoBackoff(), 0), **client_options(settings))
        self._lease_ms = int(settings.lease_ttl_s * 1000)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def take(self, probe_id: str, worker_id: str) -> ProbeOrder | None:
        """The order, which nobody else gets from now on; None when it was taken or withdrawn. Raises ValueError and such for no order."""
        with answers():
            pipe = self._redis.pipeline(transaction=True)
            pipe.getdel(keys.probe(probe_id))
            pipe.set(keys.probe_runner(probe_id), worker_id, px=self._lease_ms)
            text = cast(str | None, pipe.execute()[0])
        return None if text is None else ProbeOrder.from_json(text)

    def renew(self, probe_id: str, worker_id: str) -> bool:
        """Say that the probe is worked on. False when nobody waits for it any more."""
        with answers():
            pipe = self._redis.pipeline(transaction=True)
            pipe.exists(keys.probe_asker(probe_id))
            pipe.set(keys.probe_runner(probe_id), worker_id, px=self._lease_ms)
            return bool(pipe.execute()[0])

    def finish(self, probe_id: str, answer: ProbeAnswer) -> None:
        """Leave the answer."""
        with answers():
            pipe = self._redis.pipeline(transaction=True)
            pipe.set(keys.probe_answer(probe_id), answer.to_json(), ex=ANSWER_TTL_S)
            pipe.delete(keys.probe_runner(probe_id))
            pipe.execute()


class AskerBoard:
    """The API's side, on its event loop. Raises Unavailable when Redis does not answer."""

    def __init__(self, settings: Settings) -> None:
        self._redis = redis.asyncio.Redis.from_url(settings.redis_url, retry=AsyncRetry(NoBackoff(), 0), **client_options(settings))
        self._lease_ms = int(settings.lease_ttl_s * 1000)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def post(self, probe_id: str, order: ProbeOrder) -> None:
        """Leave the order for a worker, and say that somebody waits."""
        async with _answers():
            pipe = self._redis.pipeline(transaction=True)
            pipe.set(keys.probe(probe_id), order.to_json(), ex=ORDER_TTL_S)
            pipe.set(keys.probe_asker(probe_id), "1", px=self._lease_ms)
            await pipe.execute()

    async def look(self, probe_id: str) -> ProbeState:
        """How far it is. Looking says that somebody still waits."""
        async with _answers():
            pipe = self._redis.pipeline(transaction=True)
            pipe.exists(keys.probe(probe_id))
            pipe.exists(keys.probe_runner(probe_id))
            pipe.get(keys.probe_answer(probe_id))
            pipe.set(keys.probe_asker(probe_id), "1", px=self._lease_ms)
            is_waiting, is_running, text, _ = await pipe.execute()
        answer = None if text is None else ProbeAnswer(**json.loads(text))
        return ProbeState(bool(is_waiting), bool(is_running), answer)

    async def withdraw(self, probe_id: str) -> bool:
        """Nobody waits any more. True when no worker had taken the order, so that none ever will."""
        async with _answers():
            pipe = self._redis.pipeline(transaction=True)
            pipe.delete(keys.probe(probe_id))
            pipe.delete(keys.probe_asker(probe_id), keys.probe_answer(probe_id))
            return bool((await pipe.execute())[0])


@asynccontextmanager
async def _answers() -> AsyncIterator[None]:
    with answers():
        yield
