"""The API as a process of its own: it ends in time though streams are open, and after a restart everything goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import httpx
import pytest

from jobs.ledger import Ledger
from jobs.live import Live
from jobs.settings import Settings, bare_environment
from tests.api.conftest import Hand, eventually, spec, step_event, upload
from tests.api.test_streams import frames, read, steps_of
from tests.conftest import free_port

JOBS = "/v1/fine_tuning/jobs"


@contextmanager
def running(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m api` until the end of the block."""
    environment = {**bare_environment(), **settings.to_env()}
    with subprocess.Popen([sys.executable, "-m", "api"], env=environment) as process:
        try:
            eventually(lambda: process.poll() is None and is_up(settings.port), 60)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_open_streams_end_with_the_server_and_go_on_with_the_next(api_settings: Settings, ledger: Ledger) -> None:
    settings = replace(api_settings, port=free_port())
    live = Live.connect(settings)
    hand = Hand(ledger, live)
    with httpx.Client(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:
        with running(settings) as process, ExitStack() as stack:
            body = spec(upload(client))
            job_id = client.post(JOBS, json=body, headers={"idempotency-key": "k"}).json()["id"]
            epoch = hand.start(job_id)
            hand.ingest(job_id, *(step_event(epoch, n, n) for n in range(1, 4)))
            for _ in range(10):
                answer = stack.enter_context(client.stream("GET", f"{JOBS}/{job_id}/metrics/stream"))
                assert [next(frame for frame in frames(answer.iter_lines()) if frame.event).data["step"]] == [1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM)
        hand.publish(job_id, step_event(epoch, 4, 4))
        with running(settings):
            again = client.post(JOBS, json=body, headers={"idempotency-key": "k"})
            assert (again.status_code, again.json()["id"]) == (200, job_id)
            assert steps_of(read(client, f"{JOBS}/{job_id}/metrics/stream", last="1-1", stop_after=3)) == [2, 3, 4]
    live.close()


def test_times_are_utc_seconds_whatever_the_zone(api_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(api_settings, port=free_port())
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    with running(settings), httpx.Client(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:
        job = client.post(JOBS, json=spec(upload(client))).json()
        assert abs(job["created_at"] - time.time()) < 60
        events = client.get(f"{JOBS}/{job['id']}/events").json()["data"]
        assert all(isinstance(line["created_at"], int) for line in events)
