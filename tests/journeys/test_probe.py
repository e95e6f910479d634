"""Somebody tries a job before submitting it, on the whole server, and then sees the job begin as told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.stack import LiveStack, job_spec, live_stack, wait_for
from worker.processes import engine_processes

PATH = "/v1/fine_tuning/jobs/validate"


def try_job(server: LiveStack, spec: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{PATH}", params={"probe": "true"}, json=spec, timeout=150)


def probes(server: LiveStack) -> list[psutil.Process]:
    return [process for process, badge in engine_processes() if Path(badge.run_dir).is_relative_to(server.data_dir / "probes")]


def scratch(server: LiveStack) -> list[str]:
    return sorted(path.name for path in (server.data_dir / "probes").iterdir())


def test_the_job_begins_as_the_probe_told(server: LiveStack) -> None:
    spec = job_spec(server.upload(), num_steps=1)
    before = {job.id for job in server.client.jobs(limit=100).data}
    answer = wait_for(lambda: response if (response := try_job(server, spec)).status_code != 409 else None, "a free slot", 120)
    assert answer.status_code == 200, answer.text
    told = answer.json()["probe"]
    assert told["kl"]["value"] == 0.0
    assert told["is_whole_step"]
    assert {job.id for job in server.client.jobs(limit=100).data} == before
    assert scratch(server) == []
    job = server.client.create_job(spec)
    server.client.wait(job.id)
    (first,) = server.client.metrics(job.id)
    assert told["reward_mean"] == first.metrics["reward/mean"]
    assert told["mean_completion_tokens"] == first.metrics["completion/length_mean"]
    assert told["zero_variance_share"] == first.metrics["groups/zero_std_frac"]


@pytest.mark.faults
def test_a_probe_while_a_job_runs_two_at_once_and_one_that_is_left(tmp_path: Path) -> None:
    with live_stack(tmp_path, probe_wait_s=1.0, probe_timeout_s=100.0) as server:
        spec = job_spec(server.upload())
        long = job_spec(spec["training_file"], sampling={"group_size": 64, "prompts_per_step": 64, "max_completion_tokens": 128})
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(try_job, server, spec) for _ in range(2)]
            answers = [each.result() for each in both]
        assert sorted(answer.status_code for answer in answers) in ([200, 200], [200, 409])
        with httpx.Client(base_url=server.url, timeout=httpx.Timeout(10, read=4)) as hasty, pytest.raises(httpx.ReadTimeout):
            hasty.post(PATH, params={"probe": "true"}, json=long)
        wait_for(lambda: not probes(server) and scratch(server) == [], "the end of a probe nobody waits for")
        job = server.client.create_job(job_spec(spec["training_file"], num_steps=10_000))
        wait_for(lambda: server.engines(job.id), "the job's engine")
        busy = try_job(server, spec)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "worker_busy")
        assert server.engines(job.id), "the job was left alone"
        server.client.cancel(job.id)
        server.client.wait(job.id)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(try_job, server, long)
            wait_for(lambda: probes(server), "the probe's engine")
            server.kill("worker")
            answer = reply.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
        wait_for(lambda: not probes(server), "the engine died with its worker")
        server.restart("worker")
        wait_for(lambda: scratch(server) == [], "the new worker has cleaned up")
