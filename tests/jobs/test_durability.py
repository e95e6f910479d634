"""What was acknowledged stays, whatever is killed and whenever; what cannot be written is refused whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from grpo_engine.contract.error import InsufficientStorage
from jobs.ledger import Ledger, open_ledger
from jobs.lifecycle import State
from jobs.queue import message_ids, task_id
from jobs.settings import Settings, bare_environment
from tests.conftest import ValkeyServer
from tests.jobs.makers import FakeAttempt, make_job, make_spec, make_upload

ACCEPT_FOR_EVER = """
import pathlib, sys
from grpo_engine.contract.job import JobSpec
from jobs.ledger import open_ledger
from jobs.settings import Settings
ledger = open_ledger(Settings.from_env())
spec = JobSpec.model_validate_json(sys.argv[1])
while True:
    print(ledger.create_job(spec, training_path=pathlib.Path(sys.argv[2])).id, flush=True)
"""


def accept_and_kill(settings: Settings, upload: Path, jobs_before_kill: int, extra_s: float) -> list[str]:
    """Ids that a process acknowledged before it was killed at some moment of its work."""
    environment = {**bare_environment(), **settings.to_env()}
    command = [sys.executable, "-c", ACCEPT_FOR_EVER, make_spec().model_dump_json(), str(upload)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().strip() for _ in range(jobs_before_kill)]
        moment = time.monotonic() + extra_s
        while time.monotonic() < moment:
            pass
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
    return told + [line for line in rest[:-1] if line]


def test_every_acknowledged_job_survives_a_kill_at_any_moment(settings: Settings, ledger: Ledger) -> None:
    upload, dice = make_upload(ledger), random.Random(7)
    told: list[str] = []
    for _ in range(3):
        told += accept_and_kill(settings, upload, dice.randint(1, 5), dice.uniform(0, 0.02))
    again = open_ledger(settings)
    present = {job.id for job in again.list_jobs(limit=1000).data}
    assert set(told) <= present
    assert present <= set(again.artifacts.job_ids())
    for job_id in told:
        assert again.artifacts.read_job_json(job_id)["id"] == job_id
        assert (again.artifacts.job_dir(job_id) / "inputs" / "training.jsonl").is_file()
    again.close()


def test_a_full_database_disk_refuses_writes_whole_and_serves_reads(ledger: Ledger) -> None:
    job, upload = make_job(ledger), make_upload(ledger)
    with ledger.database.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    refused = 0
    for _ in range(200):
        try:
            ledger.create_job(make_spec(), training_path=upload)
        except InsufficientStorage:
            refused += 1
            break
    assert refused == 1
    accepted = {found.id for found in ledger.list_jobs(limit=1000).data}
    assert job.id in accepted
    assert set(ledger.artifacts.job_ids()) == accepted, "nothing is half created"
    with ledger.database.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert make_job(ledger).state is State.QUEUED


@pytest.fixture
def dispatchers(settings: Settings) -> list[subprocess.Popen[bytes]]:
    """Two at once."""
    environment = {**bare_environment(), **settings.to_env()}
    return [subprocess.Popen([sys.executable, "-m", "jobs.dispatcher"], env=environment) for _ in range(2)]


def test_two_dispatchers_of_which_one_is_killed_run_every_job_once(
    dispatchers: list[subprocess.Popen[bytes]], ledger: Ledger, valkey: ValkeyServer
) -> None:
    jobs = [make_job(ledger) for _ in range(6)]
    deadline = time.monotonic() + 60
    seen: set[str] = set()
    try:
        with redis.Redis.from_url(valkey.url, decode_responses=True) as client:
            while len(ledger.list_jobs(states=[State.SUCCEEDED]).data) < len(jobs):
                assert time.monotonic() < deadline
                answer = client.brpop(["grpo:grpo-cpu"], timeout=1)
                if answer is None:
                    continue
                (identity,) = message_ids([answer[1]])
                job_id, _, epoch = identity.partition(":")
                attempt = FakeAttempt(ledger.artifacts, job_id, int(epoch))
                if not attempt.claim():
                    continue
                assert identity not in seen
                seen.add(identity)
                attempt.step(1)
                attempt.end("succeeded", "completed", last_step=1)
                if len(seen) == 3:
                    dispatchers[0].kill()
    finally:
        for process in dispatchers:
            process.terminate()
        codes = [process.wait(timeout=30) for process in dispatchers]
    assert codes == [-signal.SIGKILL, 0]
    assert seen == {task_id(job.id, 1) for job in jobs}, "one attempt each"
    for job in jobs:
        moves = [event.type for event in ledger.events(job.id).data]
        assert moves == ["job.created", "job.dispatched", "job.running", "job.succeeded"]
        assert [row.seq for row in ledger.metrics(job.id)] == [1]
