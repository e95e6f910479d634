"""Two workers and a partition: the one that was gone comes back, finds itself replaced, and says nothing more."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs.settings import bare_environment
from tests.faults.ground import HERE, Ground, ground
from tests.stack import wait_for

pytestmark = pytest.mark.faults


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Ground]:
    """A server that gives up on a silent worker quickly."""
    with ground(tmp_path, lease_ttl_s=2.0, lost_after_s=8.0, heartbeat_s=0.5) as server:
        yield server


@pytest.fixture
def second_worker(site: Ground) -> Iterator[subprocess.Popen[bytes]]:
    """Another worker of the same server."""
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
        outcome = wait_for(lambda: site.artifacts.outcome(job_id, 1), "the first attempt to be ended", 30)
        assert outcome.reason == "superseded"
        job = site.end(job_id, "succeeded", site.like(80), was_hidden=True)
        later = [entry for entry, _ in client.xrange(f"grpo:job:{job_id}:events") if entry.startswith("1-")]
    assert len(later) == first, "the fenced attempt wrote into the stream"
    assert (job.epoch, job.worker_losses) == (2, 1)


def test_a_partition_shorter_than_the_limit_costs_nothing(site: Ground) -> None:
    job_id = site.submit("step_s=0.1", steps=40)
    site.reach(job_id, 5)
    gone = [site.process("worker"), site.pool_child(job_id)]
    for process in gone:
        process.send_signal(signal.SIGSTOP)
    wait_for(lambda: site.ledger and not _lease(site, job_id), "the lease to run out", 30)
    for process in gone:
        process.send_signal(signal.SIGCONT)
    job = site.end(job_id, "succeeded", site.like(40))
    assert (job.epoch, job.worker_losses) == (1, 0)


def _lease(site: Ground, job_id: str) -> object:
    with site.redis() as client:
        return client.get(f"grpo:job:{job_id}:lease")
