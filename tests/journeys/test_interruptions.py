"""What an operator does to a server, and what a running job makes of it: nothing is lost."""

from __future__ import annotations

import signal

import pytest

from tests.stack import LiveStack, job_spec, wait_for


def written(server: LiveStack, job_id: str, epoch: int = 1) -> int:
    """Steps the engine has completed, whoever has heard of it."""
    events = server.attempt_dir(job_id, epoch) / "events.jsonl"
    return events.read_text().count('"step.completed"') if events.exists() else 0


def test_restarts_of_api_dispatcher_and_redis_lose_no_step(server: LiveStack) -> None:
    job = server.client.create_job(job_spec(server.upload(), num_steps=60))
    for name in ("api", "dispatcher", "valkey"):
        before = wait_for(lambda: written(server, job.id), "a step")
        server.kill(name)
        wait_for(lambda before=before: written(server, job.id) > before, f"a step without {name}")
        server.restart(name)
    done = server.client.wait(job.id, timeout_s=180)
    assert (done.status, done.attempt) == ("succeeded", 1)
    assert server.steps(job.id) == list(range(1, 61))


@pytest.mark.faults
def test_a_killed_worker_costs_a_stretch_and_no_more(server: LiveStack) -> None:
    job = server.client.create_job(job_spec(server.upload(), num_steps=40))
    wait_for(lambda: written(server, job.id) >= 5, "five steps")
    server.kill("worker")
    wait_for(lambda: not server.engines(job.id), "the engine to follow its worker")
    server.restart("worker")
    done = server.client.wait(job.id, timeout_s=180)
    assert (done.status, done.attempt) == ("succeeded", 2)
    assert server.steps(job.id) == list(range(1, 41))
    assert "run.rewound" in [event.event for event in server.client.events(job.id).data]


@pytest.mark.faults
def test_a_drained_worker_repeats_no_step(server: LiveStack) -> None:
    job = server.client.create_job(job_spec(server.upload(), num_steps=40))
    wait_for(lambda: written(server, job.id) >= 5, "five steps")
    worker = server.stack.children["worker"].process
    assert worker is not None
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
    first = written(server, job.id)
    server.restart("worker")
    done = server.client.wait(job.id, timeout_s=180)
    assert (done.status, done.attempt) == ("succeeded", 2)
    assert server.steps(job.id) == list(range(1, 41))
    assert written(server, job.id, epoch=2) == 40 - first
