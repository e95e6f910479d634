"""Two workers and a partition: the one that was gone comes back, finds itself replaced, and says nothing more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest

from api.embedded.stack import Stack
from jobs.settings import bare_environment
from tests.faults.ground import HERE, Ground, add_environment, ground
from tests.faults.wire import Line
from tests.stack import wait_for

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def line() -> Iterator[list[Line]]:
    """The first worker's line to Redis, once there is one."""
    lines: list[Line] = []
    yield lines
    for one in lines:
        one.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, line: list[Line]) -> Iterator[Ground]:
    """A server that gives up on a silent worker quickly, and whose worker reaches Redis through a line of its own."""

    def through_the_line(stack: Stack) -> None:
        url = stack.settings.redis_url
        port = urlsplit(url).port
        assert port is not None
        line.append(Line(port))
        add_environment(stack, "worker", {"GRPO_REDIS_URL": url.replace(f":{port}", f":{line[0].port}")})

    with ground(tmp_path_factory.mktemp("site"), prepare=through_the_line, lease_ttl_s=2.0, lost_after_s=4.0, heartbeat_s=0.5) as server:
        yield server


@pytest.fixture
def second_worker(site: Ground) -> Iterator[subprocess.Popen[bytes]]:
    """Another worker of the same server, with a line of its own."""
    environment = {**bare_environment(), **site.settings.to_env(), "GRPO_WORKER_ID": "second", "PYTHONPATH": str(HERE.parents[1])}
    log = site.settings.data_dir / "logs" / "second.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "scripted_worker.py")], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_for(lambda: process.pid in site._listed_workers(), "the second worker")
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_worker_back_from_a_partition_is_fenced(site: Ground, second_worker: subprocess.Popen[bytes]) -> None:
    job_id = site.submit("step_s=0.1", steps=80)
    site.reach(job_id, 5)
    supervisor = site.pool_child(job_id)
    workers = [site.process("worker"), psutil.Process(second_worker.pid)]
    (cut,) = [worker for worker in workers if supervisor in worker.children(recursive=True)]
    gone = [cut, supervisor, site.engine(job_id)]
    for process in gone:
        process.suspend()
    wait_for(lambda: site.job(job_id).epoch == 2 and site.written(job_id, 2) > 5, "the other worker to go on", 60)
    with site.redis() as client:
        first = len([entry for entry, _ in client.xrange(f"grpo:job:{job_id}:events") if entry.startswith("1-")])
        for process in gone:
            process.resume()
        wait_for(lambda: not gone[-1].is_running(), "the first attempt to be ended", 30)
        outcome = site.artifacts.outcome(job_id, 1)
        assert outcome is not None
        assert outcome.reason == "worker_lost"
        job = site.end(job_id, "succeeded", site.like(80), was_hidden=True)
        later = [entry for entry, _ in client.xrange(f"grpo:job:{job_id}:events") if entry.startswith("1-")]
    assert len(later) == first, "the fenced attempt wrote into the stream"
    assert (job.epoch, job.worker_losses) == (2, 1)


def test_an_engine_behind_a_partition_trains_on_and_harms_nothing(site: Ground, line: list[Line], request: pytest.FixtureRequest) -> None:
    """Its worker lives and is heard by nobody. It goes on deleting older states until it learns, on the disk, that it is replaced."""
    job_id = site.submit("step_s=0.1", steps=150)
    site.reach(job_id, 5)
    engine = site.engine(job_id)
    with line[0].cut():
        request.getfixturevalue("second_worker")
        site.reach(job_id, site.written(job_id) + 5)
        wait_for(lambda: site.job(job_id).epoch == 2 and site.written(job_id, 2) > 5, "the other worker to go on", 60)
        wait_for(lambda: not engine.is_running(), "the hidden engine to end before the line is whole", 20)
    job = site.end(job_id, "succeeded", site.like(150), was_hidden=True)
    assert (job.epoch, job.crashes, job.worker_losses) == (2, 0, 1)
    rewound = next(event for event in site.ledger.events(job_id).data if event.type == "run.rewound")
    assert rewound.data["to_step"] > 5, "it went on where the hidden attempt was"


def test_a_partition_shorter_than_the_limit_costs_nothing(site: Ground, line: list[Line]) -> None:
    job_id = site.submit("step_s=0.1", steps=60)
    site.reach(job_id, 5)
    with line[0].cut():
        wait_for(lambda: not _lease(site, job_id), "the lease to run out", 30)
        before = site.written(job_id)
        site.reach(job_id, before + 3)
    job = site.end(job_id, "succeeded", site.like(60))
    assert (job.epoch, job.worker_losses) == (1, 0)


def test_half_a_second_of_latency_and_a_tenth_lost_lose_no_attempt(site: Ground, line: list[Line]) -> None:
    like, before = site.like(30), line[0].pieces
    line[0].slow(delay_s=0.25, loss=0.1, held_s=0.8)
    try:
        job = site.end(site.submit("step_s=0.2", steps=30), "succeeded", like)
    finally:
        line[0].slow(delay_s=0.0, loss=0.0, held_s=0.0)
    assert (job.epoch, job.worker_losses, job.crashes) == (1, 0, 0)
    assert line[0].pieces > before + 20, "the worker does not use the line"


def _lease(site: Ground, job_id: str) -> object:
    with site.redis() as client:
        return client.get(f"grpo:job:{job_id}:lease")
