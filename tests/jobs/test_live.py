"""The live tail on a real Valkey: what is appended, refused, expired, and how it fails."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from fnmatch import fnmatch

import pytest
import redis

from grpo_engine.contract.command import Command
from grpo_engine.contract.error import Unavailable
from jobs import keys
from jobs.live import MAX_NUMBER, AsyncLive, Lease, Live, WantedNote
from jobs.probes import AskerBoard, ProbeAnswer, ProbeOrder, WorkerBoard
from jobs.queue import Publisher, make_app, message_ids, queue_of, task_id
from jobs.settings import Settings
from tests.conftest import ValkeyServer, free_port

JOB = "ftjob-a"


@pytest.fixture
def live(settings: Settings) -> Live:
    return Live.connect(settings)


def test_events_come_back_in_order_and_once(live: Live) -> None:
    assert live.publish_event(JOB, '{"a":1}', 1, 1) == "appended"
    assert live.publish_event(JOB, '{"a":2}', 1, 2) == "appended"
    assert live.publish_event(JOB, '{"a":2}', 1, 2) == "duplicate"
    assert live.read_stream(JOB) == [("1-1", '{"a":1}'), ("1-2", '{"a":2}')]
    assert live.read_stream(JOB, "1-1") == [("1-2", '{"a":2}')]
    assert live.read_streams({JOB: "1-2", "ftjob-b": "0-0"}) == {}
    assert live.stream_floor(JOB) == "1-1"
    assert live.stream_floor("ftjob-b") is None


def test_an_old_attempt_is_fenced_at_the_stream(live: Live) -> None:
    live.publish_event(JOB, "{}", 2, 1)
    assert live.publish_event(JOB, "{}", 1, 500) == "fenced"
    assert [entry.id for entry in live.read_stream(JOB)] == ["2-1"]


@pytest.mark.parametrize(("epoch", "seq"), [(0, 1), (1, 0), (1, -1), (1, MAX_NUMBER + 1), (2**64, 1)])
def test_numbers_that_would_brick_the_stream_never_reach_it(live: Live, epoch: int, seq: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        live.publish_event(JOB, "{}", epoch, seq)
    assert live.publish_event(JOB, "{}", 1, 1) == "appended"


def test_the_stream_is_capped(settings: Settings) -> None:
    live = Live.connect(dataclasses.replace(settings, stream_maxlen=50))
    for seq in range(1, 1001):
        live.publish_event(JOB, "{}", 1, seq)
    kept = live.read_stream(JOB, count=2000)
    assert len(kept) < 300
    assert kept[-1].id == "1-1000"


def test_wanted_dispatch_commands_and_lease(live: Live) -> None:
    assert live.get_wanted(JOB) is None
    live.set_wanted(JOB, 3, "pause")
    assert live.get_wanted(JOB) == WantedNote(3, "pause")
    live.put_dispatch(JOB, 3, "{}")
    assert live.get_dispatch(JOB, 3) == "{}"
    assert live.get_dispatch(JOB, 2) is None
    live.put_command(JOB, Command(number=2, type="checkpoint"))
    live.put_command(JOB, Command(number=1, type="set", beta=0.1))
    assert [command.number for command in live.commands(JOB)] == [1, 2]
    live.drop_command(JOB, 1)
    assert [command.number for command in live.commands(JOB)] == [2]
    assert live.renew_lease(JOB, "w1", 3)
    assert not live.renew_lease(JOB, "w0", 2), "an older epoch learns that it is fenced"
    assert live.lease(JOB) == Lease("w1", 3)
    live.release_lease(JOB, 2)
    assert live.lease(JOB) is not None
    live.release_lease(JOB, 3)
    assert live.lease(JOB) is None


def test_every_key_has_a_time_to_live(live: Live, settings: Settings, valkey: ValkeyServer) -> None:
    live.publish_event(JOB, "{}", 1, 1)
    live.set_wanted(JOB, 1, "run")
    live.put_dispatch(JOB, 1, "{}")
    live.put_command(JOB, Command(number=1, type="checkpoint"))
    live.renew_lease(JOB, "w", 1)
    live.worker_heartbeat("w", {"host": "h"})
    live.set_generation("g")
    live.dispatcher_heartbeat({"pid": 1})
    assert live.add_spending({"key:a": 3}, 7) == {"key:a": (3, 0)}
    assert live.add_spending({"key:a": 0}, 8) == {"key:a": (0, 3)}
    live.post_notice("{}")
    asker, worker = AskerBoard(settings), WorkerBoard(settings)

    async def ask() -> None:
        for probe_id in ("a", "b", "c"):
            await asker.post(probe_id, ProbeOrder({}, {}, 1.0))
        await asker.aclose()

    asyncio.run(ask())
    worker.take("b", "w")
    worker.finish("c", ProbeAnswer())
    worker.close()
    live.ping()
    with redis.Redis.from_url(valkey.url, decode_responses=True) as client:
        found = sorted(client.scan_iter())
        written = {re.sub(r"<[a-z]+>", "*", key.pattern) for key in keys.KEYS}
        assert {pattern for pattern in written if not any(fnmatch(key, pattern) for key in found)} == set()
        assert [key for key in found if not any(fnmatch(key, pattern) for pattern in written)] == []
        assert [key for key in found if client.ttl(key) < 0] == []


def test_workers_vanish_with_their_heartbeat(settings: Settings) -> None:
    live = Live.connect(dataclasses.replace(settings, lease_ttl_s=0.4))
    live.worker_heartbeat("w1", {"host": "a"})
    assert live.workers() == {"w1": {"host": "a"}}
    deadline = time.monotonic() + 10
    while live.workers():
        assert time.monotonic() < deadline
    live.worker_heartbeat("w2", {"host": "b"})
    live.remove_worker("w2")
    assert live.workers() == {}


def test_a_redis_that_is_down_or_frozen_is_unavailable_not_a_hang(settings: Settings, own_valkey: ValkeyServer) -> None:
    settings = dataclasses.replace(settings, redis_url=own_valkey.url, redis_timeout_s=0.5)
    live, publisher = Live.connect(settings), Publisher(settings)
    publisher.enqueue(JOB, 1)
    own_valkey.freeze()
    calls = (live.ping, lambda: live.read_stream(JOB, block_ms=60_000), lambda: publisher.enqueue(JOB, 1))
    for call in calls:
        with pytest.raises(Unavailable):
            call()
    own_valkey.thaw()
    live.ping()
    publisher.enqueue(JOB, 1)
    own_valkey.kill()
    for call in calls:
        with pytest.raises(Unavailable):
            call()
    publisher.close()


def test_a_read_only_redis_is_unavailable(settings: Settings, own_valkey: ValkeyServer) -> None:
    live = Live.connect(dataclasses.replace(settings, redis_url=own_valkey.url))
    with redis.Redis.from_url(own_valkey.url) as client:
        client.replicaof("127.0.0.1", free_port())
    with pytest.raises(Unavailable, match=r"(?i)read.?only"):
        live.ping()


def test_the_async_side_reads_the_same_stream(live: Live, settings: Settings) -> None:
    live.publish_event(JOB, "{}", 1, 1)

    async def read() -> None:
        tail = AsyncLive.connect(settings)
        await tail.ping()
        assert await tail.read_stream(JOB) == [("1-1", "{}")]
        assert await tail.read_stream(JOB, "1-1", block_ms=10) == []
        assert await tail.stream_floor(JOB) == "1-1"
        waiting = asyncio.create_task(tail.read_stream(JOB, "1-1", block_ms=400))
        await asyncio.to_thread(live.publish_event, JOB, '{"n":2}', 1, 2)
        assert await waiting == [("1-2", '{"n":2}')]
        await tail.aclose()

    asyncio.run(read())


def test_the_async_side_is_unavailable_when_redis_is_frozen(settings: Settings, own_valkey: ValkeyServer) -> None:
    settings = dataclasses.replace(settings, redis_url=own_valkey.url, redis_timeout_s=0.5)

    async def read() -> None:
        tail = AsyncLive.connect(settings)
        await tail.ping()
        own_valkey.freeze()
        with pytest.raises(Unavailable):
            await tail.read_stream(JOB, block_ms=60_000)
        with pytest.raises(Unavailable):
            await tail.ping()
        await tail.aclose()

    asyncio.run(read())


def test_a_hint_in_the_queue_can_be_recognised(live: Live, settings: Settings, valkey: ValkeyServer) -> None:
    publisher = Publisher(settings)
    publisher.enqueue(JOB, 2)
    publisher.enqueue(JOB, 3, queue_of(gpus=1))
    publisher.close()
    with redis.Redis.from_url(valkey.url) as client:
        client.lpush("grpo:grpo-cpu", "not json", b"\xff\xfe", '{"headers": 3}')
    assert message_ids(live.queued_messages("grpo-cpu")) == {task_id(JOB, 2)}
    assert message_ids(live.queued_messages("grpo-gpu")) == {task_id(JOB, 3)}


def test_the_celery_settings_that_keep_long_jobs_single(settings: Settings) -> None:
    conf = make_app(settings).conf
    assert not conf.task_acks_late
    assert conf.task_ignore_result
    assert conf.worker_disable_prefetch
    assert not conf.task_reject_on_worker_lost
    assert not conf.worker_cancel_long_running_tasks_on_connection_loss
    assert conf.broker_connection_max_retries is None
    assert conf.accept_content == ["json"]
    assert conf.broker_transport_options["global_keyprefix"] == "grpo:"
    assert conf.task_time_limit is None
    assert conf.result_backend is None
