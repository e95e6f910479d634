"""Event streams: each event once and in order, whatever breaks; and nothing left behind when the reader goes."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import redis

from api.sse import StreamLimits
from jobs.ledger import Ledger
from jobs.live import Live
from jobs.settings import Settings
from tests.api.conftest import Hand, Server, create, event, eventually, step_event
from tests.conftest import ValkeyServer

JOBS = "/v1/fine_tuning/jobs"


@dataclass
class Frame:
    """One event, or a comment (`event` empty, text in `data`)."""

    id: str | None
    event: str
    data: Any


def frames(lines: Iterator[str]) -> Iterator[Frame]:
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            yield Frame(None, "", line)
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            text = fields["data"]
            yield Frame(fields.get("id"), fields.get("event", "message"), text if text == "[DONE]" else strict(text))
            fields = {}


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} on the wire"))


def read(client: httpx.Client, path: str, last: str | None = None, stop_after: int | None = None) -> list[Frame]:
    """The events (not comments) of a stream, at most so many."""
    found: list[Frame] = []
    with client.stream("GET", path, headers={"last-event-id": last} if last else {}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for frame in frames(answer.iter_lines()):
            if frame.event:
                found.append(frame)
            if stop_after is not None and len(found) >= stop_after:
                break
    return found


def steps_of(found: list[Frame]) -> list[int]:
    return [frame.data["step"] for frame in found if frame.event == "step.completed"]


def test_history_then_the_end(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, *(step_event(epoch, n, n) for n in range(1, 6)))
    hand.finish(job_id)
    found = read(client, f"{JOBS}/{job_id}/metrics/stream")
    assert steps_of(found) == [1, 2, 3, 4, 5]
    assert [frame.id for frame in found[:5]] == ["1-1", "1-2", "1-3", "1-4", "1-5"]
    assert (found[5].event, found[5].id, found[5].data["status"]) == ("job.finished", "end", "succeeded")
    assert found[6].data == "[DONE]"
    last = client.get(f"{JOBS}/{job_id}/metrics/stream", headers={"last-event-id": "end"})
    assert (last.status_code, last.content) == (204, b"")


def test_the_live_tail_comes_from_redis_before_the_database_has_it(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, step_event(epoch, 1, 1))
    hand.publish(job_id, step_event(epoch, 1, 1), step_event(epoch, 2, 2), event(epoch, 3, "beta.changed"), step_event(epoch, 4, 3))
    assert steps_of(read(client, f"{JOBS}/{job_id}/metrics/stream", stop_after=3)) == [1, 2, 3]
    assert hand.ledger.last_ingested(job_id) == (1, 1)


def test_a_tail_without_a_gap_leaves_the_database_alone(
    server: Server, client: httpx.Client, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    ledger = server.app.state.services.ledger
    asked: list[str] = []
    monkeypatch.setattr(ledger, "get_job", lambda job, get=ledger.get_job: (asked.append(job), get(job))[1])
    with client.stream("GET", f"{JOBS}/{job_id}/metrics/stream") as answer:
        events = (frame for frame in frames(answer.iter_lines()) if frame.event)
        for step in range(1, 61):
            hand.publish(job_id, step_event(epoch, step, step))
            assert next(events).data["step"] == step
    assert 1 <= len(asked) <= 20, "a reader that keeps up asks the database at every step"


def test_a_gap_in_redis_waits_for_the_database(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.publish(job_id, step_event(epoch, 4, 4), step_event(epoch, 5, 5))
    hand.ingest(job_id, step_event(epoch, 1, 1))
    with client.stream("GET", f"{JOBS}/{job_id}/metrics/stream") as answer:
        events = (frame for frame in frames(answer.iter_lines()) if frame.event)
        assert next(events).data["step"] == 1
        hand.ingest(job_id, step_event(epoch, 2, 2), step_event(epoch, 3, 3))
        assert [next(events).data["step"] for _ in range(4)] == [2, 3, 4, 5]


def test_a_rewind_is_told_once_and_steps_follow_it(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    first = hand.start(job_id)
    hand.ingest(job_id, step_event(first, 1, 1), step_event(first, 2, 2), step_event(first, 3, 3))
    client.post(f"{JOBS}/{job_id}/pause")
    hand.finish(job_id, "paused")
    client.post(f"{JOBS}/{job_id}/resume")
    second = hand.start(job_id)
    hand.publish(job_id, event(second, 1, "run.rewound", to_step=2), step_event(second, 2, 3))
    hand.ingest(job_id, event(second, 1, "run.rewound", to_step=2), step_event(second, 2, 3))
    found = read(client, f"{JOBS}/{job_id}/metrics/stream", last="1-2", stop_after=3)
    assert [(frame.id, frame.event) for frame in found] == [("1-3", "step.completed"), ("2-1", "run.rewound"), ("2-2", "step.completed")]
    assert found[1].data["to_step"] == 2
    assert [row["epoch"] for row in client.get(f"{JOBS}/{job_id}/metrics").json()["data"]] == [1, 1, 2]


def test_resuming_at_random_gives_each_step_once(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    pick = random.Random(5)
    ingested = published = 0
    last: str | None = None
    seen: list[int] = []
    while len(seen) < 300:
        target = min(300, published + pick.randint(0, 6))
        hand.publish(job_id, *(step_event(epoch, n, n) for n in range(published + 1, target + 1)))
        published = target
        behind = pick.randint(0, 4)
        until = max(ingested, published - behind) if published < 300 else 300
        if until > ingested:
            hand.ingest(job_id, *(step_event(epoch, n, n) for n in range(ingested + 1, until + 1)))
            ingested = until
        if published > len(seen):
            found = read(client, f"{JOBS}/{job_id}/metrics/stream", last, stop_after=pick.randint(1, published - len(seen)))
            seen += steps_of(found)
            last = found[-1].id
    assert seen == list(range(1, 301))


def test_the_events_stream_goes_by_the_databases_numbers(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, event(epoch, 1, "engine.started"), step_event(epoch, 2, 1))
    hand.finish(job_id)
    found = read(client, f"{JOBS}/{job_id}/events/stream")
    listed = client.get(f"{JOBS}/{job_id}/events", params={"order": "asc", "limit": 100}).json()["data"]
    assert [frame.id for frame in found[:-1]] == [line["id"] for line in listed]
    assert found[0].event == "job.created"
    assert found[-2].event == "job.succeeded"
    assert found[-1].data == "[DONE]"
    rest = read(client, f"{JOBS}/{job_id}/events/stream", last=found[1].id)
    assert [frame.id for frame in rest[:-1]] == [frame.id for frame in found[2:-1]]
    assert client.get(f"{JOBS}/{job_id}/events/stream", headers={"last-event-id": found[-2].id or ""}).status_code == 204


def test_heartbeats_are_comment_lines_that_dispatch_nothing(client: httpx.Client, hand: Hand) -> None:
    job_id = create(client)
    hand.start(job_id)
    with client.stream("GET", f"{JOBS}/{job_id}/metrics/stream") as answer:
        raw = answer.iter_raw()
        text = b"".join(next(raw) for _ in range(3))
    assert text == b": hb\n" * 3


@pytest.mark.parametrize("stream", ["metrics", "events"])
def test_a_bad_last_event_id_is_named(client: httpx.Client, stream: str) -> None:
    job_id = create(client)
    answer = client.get(f"{JOBS}/{job_id}/{stream}/stream", headers={"last-event-id": "x-y"})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "last-event-id"


@pytest.mark.parametrize(("stream", "last"), [("metrics", "1-3"), ("metrics", "2-1"), ("metrics", "9-9"), ("events", "ftevent-999999")])
def test_an_id_the_job_has_not_reached_is_refused(client: httpx.Client, hand: Hand, stream: str, last: str) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, step_event(epoch, 1, 1), step_event(epoch, 2, 2))
    answer = client.get(f"{JOBS}/{job_id}/{stream}/stream", headers={"last-event-id": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "last-event-id")


@pytest.mark.parametrize("known_to", ["redis", "file"])
def test_an_id_ahead_of_the_database_goes_on(client: httpx.Client, server: Server, hand: Hand, known_to: str) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, step_event(epoch, 1, 1))
    ahead = step_event(epoch, 2, 2)
    if known_to == "redis":
        hand.publish(job_id, step_event(epoch, 1, 1), ahead)
    else:
        path = server.app.state.services.artifacts.events_path(job_id, epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("damaged\n" + ahead.to_line() + "\ndamaged, too\n")
    with client.stream("GET", f"{JOBS}/{job_id}/metrics/stream", headers={"last-event-id": f"{epoch}-2"}) as answer:
        assert answer.status_code == 200


def test_readers_that_leave_free_their_slot_and_their_redis_connection(
    server: Server, client: httpx.Client, hand: Hand, valkey: ValkeyServer
) -> None:
    job_id = create(client)
    hand.start(job_id)
    with redis.Redis(port=valkey.port) as admin:
        client.get(f"{JOBS}/{job_id}/metrics/integrity")
        before = len(admin.client_list())
        readers = []
        for _ in range(20):
            reader = socket.create_connection(("127.0.0.1", server.port))
            reader.sendall(f"GET {JOBS}/{job_id}/metrics/stream HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n\r\n".encode())
            assert reader.recv(64).startswith(b"HTTP/1.1 200")
            readers.append(reader)
        eventually(lambda: server.open_streams == 20)
        eventually(lambda: len(admin.client_list()) > before)
        assert len(admin.client_list()) <= before + 2, "readers of the same stream ask Redis once, not twenty times"
        for reader in readers:
            reader.close()
        eventually(lambda: server.open_streams == 0)
        eventually(lambda: len(admin.client_list()) <= before)


def test_a_frozen_reader_is_dropped(api_settings: Settings, ledger: Ledger) -> None:
    running = Server(api_settings, StreamLimits(heartbeat_s=0.2, poll_s=0.05, send_timeout_s=0.5))
    live = Live.connect(api_settings)
    try:
        with running.client() as client:
            job_id = create(client)
            hand = Hand(ledger, live)
            epoch = hand.start(job_id)
            noise = {f"kl/ref/k{n % 3 + 1}/mean{n}": 0.123456789 for n in range(3000)}
            hand.ingest(job_id, *(step_event(epoch, n, n, **noise) for n in range(1, 80)))
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", running.port))
            reader.sendall(f"GET {JOBS}/{job_id}/metrics/stream HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            eventually(lambda: running.open_streams == 1)
            eventually(lambda: running.open_streams == 0)
            assert client.get("/healthz").status_code == 200
            reader.close()
    finally:
        live.close()
        running.stop()


def test_too_many_streams_are_429(api_settings: Settings) -> None:
    running = Server(api_settings, StreamLimits(heartbeat_s=0.2, poll_s=0.05, max_streams=1))
    try:
        with running.client() as client:
            path = f"{JOBS}/{create(client)}/metrics/stream"
            with client.stream("GET", path) as first:
                assert first.status_code == 200
                second = client.get(path)
                assert second.status_code == 429
                assert second.headers["retry-after"] == "15"
                assert second.json()["error"]["code"] == "rate_limit_exceeded"
                assert client.get(path.replace("metrics", "logs")).status_code == 429
    finally:
        running.stop()


def test_without_redis_the_database_serves_and_the_stream_says_so(
    api_settings: Settings, limits: StreamLimits, own_valkey: ValkeyServer, ledger: Ledger
) -> None:
    running = Server(replace(api_settings, redis_url=own_valkey.url).resolved(), limits)
    live = Live.connect(running.settings)
    hand = Hand(ledger, live)
    try:
        with running.client() as client:
            job_id = create(client)
            epoch = hand.start(job_id)
            hand.ingest(job_id, step_event(epoch, 1, 1))
            own_valkey.kill()
            with client.stream("GET", f"{JOBS}/{job_id}/metrics/stream") as answer:
                everything = frames(answer.iter_lines())
                assert next(frame for frame in everything if frame.event).data["step"] == 1
                assert next(frame for frame in everything if frame.data == ": degraded")
                hand.ingest(job_id, step_event(epoch, 2, 2))
                assert next(frame for frame in everything if frame.event).data["step"] == 2
                own_valkey.start()
                hand.publish(job_id, step_event(epoch, 3, 3))
                assert next(frame for frame in everything if frame.event).data["step"] == 3
    finally:
        live.close()
        running.stop()


def test_a_frozen_redis_delays_no_read_of_the_database(api_settings: Settings, limits: StreamLimits, own_valkey: ValkeyServer) -> None:
    running = Server(replace(api_settings, redis_url=own_valkey.url).resolved(), limits)
    try:
        with running.client() as client:
            job_id = create(client)
            own_valkey.freeze()
            try:
                assert client.get(f"{JOBS}/{job_id}").status_code == 200
                assert client.get(f"{JOBS}/{job_id}/metrics").json()["data"] == []
                assert create(client) != job_id
                assert client.get(f"{JOBS}/{job_id}/metrics/integrity").json()["ingest_lag"] is None
                ready = client.get("/readyz")
                assert ready.status_code == 503
                assert "Redis" in ready.json()["checks"]["redis"]
            finally:
                own_valkey.thaw()
    finally:
        running.stop()
