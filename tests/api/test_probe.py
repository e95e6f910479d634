"""validate?probe=true, with a hand that plays the worker: what is asked, what each end answers, and that nothing is created."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis

from api.sse import StreamLimits
from grpo_engine.contract.probe_view import Probe
from jobs import keys
from jobs.live import Live
from jobs.probes import ProbeAnswer, ProbeOrder, WorkerBoard
from jobs.settings import Settings
from tests.api.conftest import Server, eventually, spec, upload
from tests.conftest import ValkeyServer

EXAMPLE: dict[str, Any] = Probe.model_json_schema()["examples"][0]
JOBS = "/v1/fine_tuning/jobs"
PATH = f"{JOBS}/validate"


class Worker:
    """A worker's heartbeat, and its hand in the queue."""

    def __init__(self, settings: Settings) -> None:
        self.board = WorkerBoard(settings)
        self.live = Live.connect(settings)
        self._redis = redis.Redis.from_url(settings.redis_url, decode_responses=True)

    def appear(self, queue: str = "grpo-cpu") -> None:
        self.live.worker_heartbeat("worker-1", {"queues": [queue], "slots": 1})

    def asked(self, queue: str = "grpo-cpu") -> str:
        """The id in the next message."""
        found = self._redis.brpop([f"{keys.PREFIX}{queue}"], timeout=20)
        assert found is not None
        message = json.loads(found[1])
        assert message["headers"]["task"] == "grpo.probe"
        return str(message["headers"]["id"])

    def take(self) -> tuple[str, ProbeOrder]:
        probe_id = self.asked()
        order = self.board.take(probe_id, "worker-1")
        assert order is not None
        return probe_id, order

    def left(self) -> list[str]:
        """Keys of probes."""
        return sorted(self._redis.scan_iter(f"{keys.PREFIX}probe:*"))

    def drop(self, key: str) -> None:
        self._redis.delete(key)

    def close(self) -> None:
        self.board.close()
        self.live.close()
        self._redis.close()


@pytest.fixture
def worker(server: Server) -> Iterator[Worker]:
    found = Worker(server.settings)
    yield found
    found.close()


@pytest.fixture
def api_settings(api_settings: Settings) -> Settings:
    return dataclasses.replace(api_settings, probe_wait_s=2.0, lease_ttl_s=5.0, lost_after_s=5.0)


@pytest.fixture
def ask(server: Server, client: httpx.Client) -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Send a request beside the test."""
    file_id = upload(client)
    with ThreadPoolExecutor(4) as pool:

        def send(**grpo: Any) -> Future[httpx.Response]:
            def post() -> httpx.Response:
                with server.client() as own:
                    return own.post(PATH, params={"probe": "true"}, json=spec(file_id, **grpo))

            return pool.submit(post)

        yield send


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    body = response.json()["error"]
    return response.status_code, body["code"], body["param"]


def test_the_answer_is_the_workers_and_nothing_is_created(
    client: httpx.Client, worker: Worker, ask: Callable[..., Future[httpx.Response]]
) -> None:
    worker.appear()
    reply = ask()
    probe_id, order = worker.take()
    assert order.spec["model"] == "tiny"
    assert order.spec["method"]["grpo"]["limits"]["num_steps"] == 10
    assert order.paths["training_file"].startswith("files/file-")
    assert set(order.paths) == {"training_file"}
    assert worker.board.renew(probe_id, "worker-1"), "somebody waits"
    worker.board.finish(probe_id, ProbeAnswer(probe=EXAMPLE))
    response = reply.result(20)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["probe"] == EXAMPLE
    assert (body["is_valid"], body["rows"]) == (True, 20)
    assert client.get(JOBS).json()["data"] == []
    eventually(lambda: worker.left() == [])


def test_without_probe_no_worker_is_asked(client: httpx.Client, worker: Worker) -> None:
    answer = client.post(PATH, json=spec(upload(client)))
    assert (answer.status_code, answer.json()["probe"]) == (200, None)
    assert worker.left() == []
    assert client.post(PATH, params={"probe": "maybe"}, json={}).status_code == 422


def test_a_spec_that_is_wrong_reaches_no_worker(client: httpx.Client, worker: Worker) -> None:
    worker.appear()
    answer = client.post(PATH, params={"probe": "true"}, json=spec("file-none"))
    assert error_of(answer) == (422, "invalid_request", "training_file")
    assert worker.left() == []


def test_nobody_to_ask(worker: Worker, ask: Callable[..., Future[httpx.Response]]) -> None:
    response = ask().result(20)
    assert error_of(response) == (409, "no_worker", "probe")
    assert "grpo worker" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
    worker.appear("grpo-gpu")
    eventually(lambda: worker.live.workers() != {})
    assert error_of(ask().result(20))[:2] == (409, "no_worker")
    assert worker.left() == []


def test_a_busy_worker_is_said_at_once_and_its_late_message_finds_nothing(
    worker: Worker, ask: Callable[..., Future[httpx.Response]]
) -> None:
    worker.appear()
    response = ask().result(20)
    assert error_of(response) == (409, "worker_busy", "probe")
    late = worker.asked()
    assert worker.left() == []
    assert worker.board.take(late, "worker-1") is None


ENDS = [
    ("config_error", 422, False), ("out_of_memory", 422, False), ("nonfinite", 422, False), ("reference_mismatch", 422, False),
    ("crash", 500, False), ("worker_lost", 503, True), ("drain", 503, True), ("unavailable", 503, True), ("probe_timeout", 504, False),
]  # fmt: skip


def test_how_a_worker_says_no(worker: Worker, ask: Callable[..., Future[httpx.Response]]) -> None:
    for code, status, is_retried in ENDS:
        worker.appear()
        reply = ask()
        probe_id, _ = worker.take()
        param = "method.grpo.sampling.group_size" if status == 422 else None
        worker.board.finish(probe_id, ProbeAnswer(code=code, message="in words", param=param))
        response = reply.result(20)
        assert error_of(response) == (status, code, param)
        assert response.json()["error"]["message"] == "in words"
        assert ("Retry-After" in response.headers) == is_retried
        assert (response.headers.get("x-should-retry") == "false") == (not is_retried)


def test_a_field_is_named_as_it_was_written(worker: Worker, client: httpx.Client, server: Server) -> None:
    body = spec(upload(client))
    body["method"]["grpo"]["kl_coef"] = body["method"]["grpo"].pop("beta")
    worker.appear()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(lambda: client.post(PATH, params={"probe": "true"}, json=body))
        probe_id, _ = worker.take()
        worker.board.finish(probe_id, ProbeAnswer(code="config_error", message="too large", param="method.grpo.beta"))
        assert error_of(reply.result(20)) == (422, "config_error", "method.grpo.kl_coef")


def test_a_worker_that_vanishes_and_an_answer_of_another_version(worker: Worker, ask: Callable[..., Future[httpx.Response]]) -> None:
    worker.appear()
    reply = ask()
    probe_id, _ = worker.take()
    worker.drop(keys.probe_runner(probe_id))
    assert error_of(reply.result(20))[:2] == (503, "worker_lost")
    worker.appear()
    reply = ask()
    probe_id, _ = worker.take()
    worker.board.finish(probe_id, ProbeAnswer(probe={**EXAMPLE, "colour": "red"}))
    assert error_of(reply.result(20))[:2] == (503, "unavailable")


def test_who_leaves_ends_the_probe(server: Server, client: httpx.Client, worker: Worker) -> None:
    worker.appear()
    body, gone = spec(upload(client)), threading.Event()

    def leave() -> None:
        with httpx.Client(base_url=server.url, timeout=httpx.Timeout(10, read=1.0)) as hasty, pytest.raises(httpx.ReadTimeout):
            hasty.post(PATH, params={"probe": "true"}, json=body)
        gone.set()

    thread = threading.Thread(target=leave)
    thread.start()
    probe_id, _ = worker.take()
    assert worker.board.renew(probe_id, "worker-1")
    thread.join(20)
    assert gone.is_set()
    eventually(lambda: not worker.board.renew(probe_id, "worker-1"))


def test_two_probes_do_not_meet(worker: Worker, ask: Callable[..., Future[httpx.Response]]) -> None:
    worker.appear()
    replies = [ask(limits={"num_steps": 1}), ask(limits={"num_steps": 2})]
    for _ in replies:
        probe_id, order = worker.take()
        worker.board.finish(probe_id, ProbeAnswer(probe={**EXAMPLE, "num_steps": order.spec["method"]["grpo"]["limits"]["num_steps"]}))
    assert [reply.result(20).json()["probe"]["num_steps"] for reply in replies] == [1, 2]


def test_several_processes_are_refused(worker: Worker, ask: Callable[..., Future[httpx.Response]]) -> None:
    worker.appear()
    assert error_of(ask(resources={"cpu_ranks": 2}).result(20))[:2] == (422, "not_implemented")


def test_a_redis_that_is_away_is_503_in_bounded_time(api_settings: Settings, limits: StreamLimits, own_valkey: ValkeyServer) -> None:
    running = Server(dataclasses.replace(api_settings, redis_url=own_valkey.url), limits)
    try:
        with running.client() as client:
            body = spec(upload(client))
            own_valkey.kill()
            answer = client.post(PATH, params={"probe": "true"}, json=body)
            assert error_of(answer)[:2] == (503, "unavailable")
    finally:
        running.stop()
