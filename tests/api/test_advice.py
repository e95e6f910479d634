"""What a job is told about itself: warnings, its divergence in words, and when it should start."""

from __future__ import annotations

import time

import httpx
import pytest

from api.queue_places import _Load, expected_starts
from tests.api.conftest import Hand, create, eventually, spec, step_event, upload
from worker import capabilities

JOBS = "/v1/fine_tuning/jobs"


def test_a_valid_job_that_will_disappoint_is_warned_about_at_its_field(client: httpx.Client, hand: Hand) -> None:
    hand.live.worker_heartbeat("worker-1", {"queues": ["grpo-cpu"], "slots": 1})
    body = spec(upload(client), beta=0.5, kl={"grad": "naive"})
    validated = client.post(f"{JOBS}/validate", json=body).json()["warnings"]
    created = client.post(JOBS, json=body).json()
    assert [(one["code"], one["param"]) for one in validated] == [
        ("beta_high", "method.grpo.beta"),
        ("biased_gradient", "method.grpo.kl.grad"),
    ]
    assert created["warnings"] == validated
    assert client.get(f"{JOBS}/{created['id']}").json()["warnings"] == validated
    assert "the other direction" in validated[1]["message"]


def test_a_healthy_job_has_no_warnings(client: httpx.Client) -> None:
    assert client.get(f"{JOBS}/{create(client)}").json()["warnings"] == []


def test_validate_warns_when_no_live_worker_has_a_gpu(client: httpx.Client, hand: Hand) -> None:
    hand.live.worker_heartbeat("worker-1", {"queues": ["grpo-cpu"], "slots": 1})
    warned = client.post(f"{JOBS}/validate", json=spec(upload(client), resources={"gpus": 1})).json()["warnings"]
    assert [(one["code"], one["param"]) for one in warned] == [("no_worker", "method.grpo.resources.gpus")]


def test_the_divergence_is_said_in_words_from_the_start(client: httpx.Client) -> None:
    plain = client.get(f"{JOBS}/{create(client)}").json()["kl"]
    assert (plain["step"], plain["ref_kl"]) == (0, None)
    assert plain["divergence"] == (
        "KL(pi_theta || pi_ref) (reverse KL), estimated by k3 on the sampled tokens, nats per token; in the loss with its unbiased gradient"
    )
    exact = client.get(f"{JOBS}/{create(client, kl={'estimator': 'exact', 'direction': 'forward'})}").json()["kl"]["divergence"]
    assert exact.startswith("KL(pi_ref || pi_theta) (forward KL), summed over the whole vocabulary")


def test_the_place_in_the_queue_has_a_start_from_measured_steps(client: httpx.Client, hand: Hand) -> None:
    first, second, third = (create(client) for _ in range(3))
    assert client.get(f"{JOBS}/{second}").json()["queue"]["eta"] is None
    epoch = hand.start(first)
    now = time.time()
    hand.ingest(first, step_event(epoch, 1, 4, **{"time/step_s": 100.0}).model_copy(update={"time": now}))

    def etas() -> list[int | None]:
        hand.live.worker_heartbeat("worker-1", {"queues": ["grpo-cpu"], "slots": 1})
        return [client.get(f"{JOBS}/{job_id}").json()["queue"]["eta"] for job_id in (second, third)]

    eventually(lambda: etas() == [pytest.approx(now + 6 * 100, abs=2), pytest.approx(now + 16 * 100, abs=2)])


def test_starts_follow_from_slots() -> None:
    running = [_Load(2.0, 100.0, 10), _Load(1.0, 100.0, 5)]
    assert expected_starts([10, 10, 10], running, 2.0, 2, now=100.0) == [105, 120, 125]
    assert expected_starts([10, 10], running, 2.0, 3, now=100.0) == [100, 105]
    assert expected_starts([10, 10], [], 2.0, None, now=100.0) == [100, 120]
    assert expected_starts([10], running, None, 2, now=100.0) == [None]
    assert expected_starts([10], running, 2.0, 0, now=100.0) == [None]


def test_a_worker_serves_the_gpu_queue_by_itself_when_a_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "gpus", lambda: [])
    assert capabilities.served_queues(("auto",)) == ("grpo-cpu",)
    monkeypatch.setattr(capabilities, "gpus", lambda: [{"kind": "cuda"}])
    assert capabilities.served_queues(("auto",)) == ("grpo-cpu", "grpo-gpu")
    assert capabilities.served_queues(("grpo-cpu",)) == ("grpo-cpu",)
