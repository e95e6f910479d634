"""The API, the dispatcher and the database harmed: what was acknowledged stays, what is refused is refused whole."""

from __future__ import annotations

import dataclasses
import random
import sqlite3
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from grpo_engine.contract.error import Unavailable
from jobs.ledger import IdempotencyKey, Ledger, open_ledger
from jobs.lifecycle import State
from jobs.settings import Settings
from tests.faults.ground import Ground
from tests.jobs.makers import make_job, make_spec, make_upload
from tests.jobs.test_dispatcher import Room
from tests.stack import wait_for


@pytest.mark.faults
def test_an_api_killed_during_a_post_leaves_no_job_or_one(yard: Ground) -> None:
    """Killed at some moment around the commit; the same key afterwards gives the job that was made, or makes it."""
    dice = random.Random(27)
    spec, like = yard.spec(steps=1), yard.like(1)
    for number in range(3):
        headers = {"idempotency-key": f"killed-{number}"}
        told: list[str] = []
        before = {job.id for job in yard.ledger.list_jobs(limit=1000).data}

        def post(headers: dict[str, str] = headers, told: list[str] = told) -> None:
            try:
                answer = httpx.post(f"{yard.url}/v1/fine_tuning/jobs", json=spec, headers=headers, timeout=30)
                told.append(answer.json()["id"])
            except httpx.TransportError:
                return  # the API died before it answered

        thread = threading.Thread(target=post)
        thread.start()
        thread.join(dice.uniform(0.0, 0.03))
        yard.kill("api")
        thread.join()
        yard.restart("api")
        job_id = wait_for(lambda spec=spec, number=number: _create(yard, spec, f"killed-{number}"), "the API to accept", 60)
        assert told in ([], [job_id])
        assert yard.end(job_id, "succeeded", like).epoch == 1
        assert {job.id for job in yard.ledger.list_jobs(limit=1000).data} - before == {job_id}, "one job, and no other"
        assert set(yard.artifacts.job_ids()) - before == {job_id}


def _create(yard: Ground, spec: dict[str, object], key: str) -> str | None:
    try:
        answer = httpx.post(f"{yard.url}/v1/fine_tuning/jobs", json=spec, headers={"idempotency-key": key}, timeout=30)
    except httpx.TransportError:
        return None
    assert answer.status_code in (200, 201), answer.text
    job_id: str = answer.json()["id"]
    return job_id


@pytest.fixture
def impatient(settings: Settings) -> Iterator[Ledger]:
    """A ledger that waits for the write lock for a moment only."""
    book = open_ledger(dataclasses.replace(settings, database_timeout_s=0.3))
    yield book
    book.close()


def test_a_long_writer_makes_others_wait_and_then_refuse_whole(impatient: Ledger, settings: Settings) -> None:
    job, upload = make_job(impatient), make_upload(impatient)
    writer = sqlite3.connect(settings.data_dir / "grpo.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(Unavailable) as refused:
            impatient.create_job(make_spec(), training_path=upload)
        assert refused.value.headers["Retry-After"] == "5"
        assert impatient.get_job(job.id).state is State.QUEUED, "readers do not wait"
        assert list(impatient.artifacts.job_ids()) == [job.id], "nothing is half created"
    finally:
        writer.execute("ROLLBACK")
        writer.close()
    key = IdempotencyKey("local", "again", "0" * 64)
    assert impatient.create_job(make_spec(), training_path=upload, idempotency=key).state is State.QUEUED


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_a_wall_clock_that_jumps_loses_nobody(settings: Settings, jump_s: float) -> None:
    room = Room(settings)
    try:
        job = make_job(room.ledger)
        attempt = room.start(job.id)
        attempt.step(1)
        room.publish(attempt)
        room.turn()
        room.ledger.clock = lambda: time.time() + jump_s
        attempt.step(2)
        room.publish(attempt)
        room.wait(room.settings.lost_after_s * 2, lambda: room.live.renew_lease(job.id, "w1", 1))
        assert (room.state(job.id), room.ledger.get_job(job.id).epoch) == (State.RUNNING, 1)
        attempt.end("failed", "crash", retryable=True, last_step=2)
        wait_for(lambda: room.turn() or room.ledger.get_job(job.id).epoch == 2, "the next attempt", 20)
        assert [row.step for row in room.ledger.metrics(job.id)] == [1, 2]
    finally:
        room.close()
