"""A job of two processes over two hosts, through the whole server: a worker on the one, a companion on the other. Both are this host."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.settings import Settings, SettingsError, bare_environment
from tests.stack import LiveStack, job_spec, live_stack, wait_for

DEADLINE_S = 400
TWO = {"device": "cpu", "precision": "fp32", "cpu_ranks": 2, "strategy": "fsdp", "rank_timeout_s": 120}


def over_two_hosts() -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"rank_hosts": 2, "rank_address": f"127.0.0.1:{free.getsockname()[1]}", "rank_interface": "lo"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveStack]:
    with live_stack(tmp_path, **over_two_hosts()) as stack:
        yield stack


@pytest.fixture
def companion(server: LiveStack) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**bare_environment(), **server.settings.to_env()}
    process = subprocess.Popen([sys.executable, "-m", "worker.companion", "--host", "1"], env=environment)
    yield process
    process.kill()
    process.wait()


def here(companion: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """What the companion has started and what that has."""
    return psutil.Process(companion.pid).children(recursive=True)


@pytest.mark.faults
def test_a_job_over_two_hosts_succeeds_and_one_that_is_cancelled_leaves_nothing_on_either(
    server: LiveStack, companion: subprocess.Popen[bytes]
) -> None:
    file = server.upload()
    job_id = server.client.create_job(job_spec(file, num_steps=2, resources=TWO)).id
    wait_for(lambda: server.client.job(job_id).is_terminal, "the end of the job", DEADLINE_S)
    job = server.client.job(job_id)
    assert job.status == "succeeded", job.error
    assert server.steps(job_id) == [1, 2]
    (started,) = (event for event in server.client.events(job_id).data if event.event == "engine.started")
    assert (started.data["ranks"], started.data["hosts"], started.data["strategy"]) == (2, 2, "fsdp")
    wait_for(lambda: not here(companion), "the companion to be free again", 30)
    cancelled = server.client.create_job(job_spec(file, num_steps=100_000, resources=TWO)).id
    wait_for(lambda: server.steps(cancelled), "the first step", DEADLINE_S)
    assert len(here(companion)) == 2, "a parent and its one process"
    server.client.cancel(cancelled)
    wait_for(lambda: server.client.job(cancelled).is_terminal, "the cancel", DEADLINE_S)
    wait_for(lambda: not server.engines(cancelled) and not here(companion), "both hosts to be empty", 30)
    companion.send_signal(signal.SIGTERM)
    assert companion.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GRPO_RANK_HOSTS": "2"}, "belong together"),
        ({"GRPO_RANK_ADDRESS": "a:1", "GRPO_RANK_INTERFACE": "lo"}, "belong together"),
        ({"GRPO_RANK_HOSTS": "2", "GRPO_RANK_ADDRESS": "a", "GRPO_RANK_INTERFACE": "lo"}, "host:port"),
    ],
)
def test_settings_that_cannot_be(variables: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.from_env(variables)
    assert Settings.from_env({}).ranks_over_hosts() is None
