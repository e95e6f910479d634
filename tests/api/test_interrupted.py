"""Ctrl-C on a command that follows a job: exit code 130, a sentence that says so, and the job goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import Hand, create, eventually, spec, step_event, upload
from tests.cli.terminal import Terminal
from tests.server import Server


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_interrupting_watch_leaves_the_job_running(
    server: Server, client: httpx.Client, hand: Hand, tmp_path: Path, follower: list[Terminal]
) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    hand.ingest(job_id, step_event(epoch, 1, 1))
    follower.append(Terminal("watch", job_id, "--url", server.url, cwd=tmp_path))
    watching = follower[0]
    watching.wait_for("1/10")
    watching.interrupt()
    assert watching.end() == 130
    assert f"job {job_id} goes on" in watching.text()
    assert "Traceback" not in watching.text()
    assert client.get(f"/v1/fine_tuning/jobs/{job_id}").json()["status"] == "running"
    hand.ingest(job_id, step_event(epoch, 2, 2))
    assert client.get(f"/v1/fine_tuning/jobs/{job_id}").json()["progress"]["step"] == 2


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_interrupting_submit_wait_leaves_the_job(
    server: Server, client: httpx.Client, tmp_path: Path, follower: list[Terminal], flags: list[str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(spec(upload(client))))
    follower.append(Terminal("submit", "job.json", "--wait", *flags, "--url", server.url, cwd=tmp_path))
    waiting = follower[0]
    eventually(lambda: client.get("/v1/fine_tuning/jobs").json()["data"], within_s=90)
    (job,) = client.get("/v1/fine_tuning/jobs").json()["data"]
    if not flags:
        waiting.wait_for("accepted")
    waiting.interrupt()
    assert waiting.end() == 130
    assert f"job {job['id']} goes on" in waiting.text()
    assert client.get(f"/v1/fine_tuning/jobs/{job['id']}").json()["status"] == "queued"
