"""Redis killed, frozen, wiped, cut, full, re-keyed under a running job: training goes on, nothing is lost, nothing hangs."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from jobs.lifecycle import State
from tests.faults.ground import Ground
from tests.stack import wait_for

pytestmark = pytest.mark.faults
JOBS = "/v1/fine_tuning/jobs"


def running(yard: Ground, steps: int = 40, step_s: float = 0.1) -> str:
    """A job in the middle of its work."""
    job_id = yard.submit(f"step_s={step_s}", steps=steps)
    yard.reach(job_id, 3)
    wait_for(lambda: yard.job(job_id).step >= 2, "the database to hear of it")
    return job_id


def goes_on(yard: Ground, job_id: str, steps: int = 5) -> None:
    """Training is not bothered."""
    yard.reach(job_id, yard.written(job_id) + steps)


@contextmanager
def frozen(yard: Ground) -> Iterator[None]:
    yard.signal("valkey", signal.SIGSTOP)
    try:
        yield
    finally:
        yard.signal("valkey", signal.SIGCONT)


def test_killed_under_a_running_job(yard: Ground) -> None:
    job_id = running(yard)
    yard.kill("valkey")
    goes_on(yard, job_id)
    yard.restart("valkey")
    assert yard.end(job_id, "succeeded", yard.like(40)).epoch == 1


def test_every_connection_cut_twenty_times(yard: Ground) -> None:
    job_id = running(yard)
    with yard.redis() as client:
        cut = 0
        for _ in range(20):
            cut += int(str(client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")))
            goes_on(yard, job_id, 1)
        assert cut >= 20
    assert yard.end(job_id, "succeeded", yard.like(40)).epoch == 1
    after = yard.submit()
    assert yard.end(after, "succeeded", yard.like()).epoch == 1


def test_down_for_longer_than_a_job_may_be_silent(yard: Ground) -> None:
    job_id = running(yard, steps=200)
    yard.kill("valkey")
    until = time.monotonic() + yard.settings.lost_after_s + yard.settings.lease_ttl_s
    wait_for(lambda: time.monotonic() > until, "the time in which a job counts as lost", 60)
    yard.restart("valkey")
    assert yard.written(job_id) < 200, "it is still training: there is somebody to misjudge"
    assert yard.end(job_id, "succeeded", yard.like(200)).epoch == 1


def test_wiped_with_a_job_running_and_others_waiting(yard: Ground) -> None:
    job_id = running(yard)
    waiting = [yard.submit() for _ in range(3)]
    with yard.redis() as client:
        wait_for(lambda: client.llen("grpo:grpo-cpu") == 3, "their messages")
        client.flushall()
    assert yard.end(job_id, "succeeded", yard.like(40)).epoch == 1
    for one in waiting:
        assert yard.end(one, "succeeded", yard.like()).epoch == 1


def test_the_end_of_its_log_cut_off(yard: Ground) -> None:
    job_id = running(yard)
    waiting = yard.submit()
    yard.kill("valkey")
    folder = yard.settings.data_dir / "valkey" / "appendonlydir"
    log = max(folder.glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 40)
    yard.restart("valkey")
    assert yard.end(job_id, "succeeded", yard.like(40)).epoch == 1
    assert yard.end(waiting, "succeeded", yard.like()).epoch == 1


def test_frozen_and_the_api_serves_what_the_database_knows(yard: Ground) -> None:
    job_id = running(yard, steps=300)
    with frozen(yard), httpx.Client(base_url=yard.url, timeout=15) as client:
        goes_on(yard, job_id)
        assert client.get(f"{JOBS}/{job_id}").json()["status"] == "running"
        assert client.get(f"{JOBS}/{job_id}/metrics").status_code == 200
        late = client.post(JOBS, json=yard.spec()).json()["id"]
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["database"]) == (503, "ok")
        assert "Redis does not answer" in ready.json()["checks"]["redis"]
        with client.stream("GET", f"{JOBS}/{job_id}/metrics/stream") as stream:
            lines = itertools.islice(stream.iter_lines(), 2000)
            assert any("degraded" in line for line in lines)
        assert yard.job(job_id).state is State.RUNNING
    assert yard.end(job_id, "succeeded", yard.like(300)).epoch == 1
    assert yard.end(late, "succeeded", yard.like()).epoch == 1


def test_full_and_submissions_are_still_accepted(yard: Ground) -> None:
    job_id = running(yard)
    with yard.redis() as client:
        client.config_set("maxmemory", "1")
        wait_for(lambda: httpx.get(f"{yard.url}/readyz", timeout=15).status_code == 503, "readiness to say so")
        late = yard.submit()
        goes_on(yard, job_id)
        client.config_set("maxmemory", "0")
    assert yard.end(job_id, "succeeded", yard.like(40)).epoch == 1
    assert yard.end(late, "succeeded", yard.like()).epoch == 1


def test_read_only(yard: Ground) -> None:
    job_id = running(yard)
    with yard.redis() as client:
        client.replicaof("127.0.0.1", 1)
        wait_for(lambda: httpx.get(f"{yard.url}/readyz", timeout=15).status_code == 503, "readiness to say so")
        goes_on(yard, job_id)
        late = yard.submit()
        client.replicaof("NO", "ONE")
    assert yard.end(job_id, "succeeded", yard.like(40)).epoch == 1
    assert yard.end(late, "succeeded", yard.like()).epoch == 1


def test_its_password_changed_and_changed_back(yard: Ground) -> None:
    job_id = running(yard)
    with yard.redis() as client:
        password = client.config_get("requirepass")["requirepass"]
        client.config_set("requirepass", "another")
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        goes_on(yard, job_id)
        checks = wait_for(lambda: (answer := httpx.get(f"{yard.url}/readyz", timeout=15)).status_code == 503 and answer, "readiness")
        assert "invalid username-password" in checks.json()["checks"]["redis"]
        client.config_set("requirepass", password)
    assert yard.end(job_id, "succeeded", yard.like(40)).epoch == 1


def test_held_up_again_and_again_without_a_false_loss(yard: Ground) -> None:
    """Twenty short freezes: each is longer than a heartbeat, none as long as a lease."""
    job_id = running(yard, steps=60)
    stop = threading.Event()

    def hold(pause: Callable[[float], bool]) -> None:
        while not pause(yard.settings.heartbeat_s):
            with frozen(yard):
                pause(yard.settings.lease_ttl_s / 4)

    thread = threading.Thread(target=hold, args=(stop.wait,))
    thread.start()
    try:
        goes_on(yard, job_id, 40)
    finally:
        stop.set()
        thread.join()
    job = yard.end(job_id, "succeeded", yard.like(60))
    assert (job.epoch, job.worker_losses) == (1, 0)
