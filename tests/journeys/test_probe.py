"""Somebody tries a job before submitting it, on the whole server, and then sees the job begin as told."""

from __future__ import annotations

from typing import Any

import httpx

from tests.stack import LiveStack, job_spec, wait_for

PATH = "/v1/fine_tuning/jobs/validate"


def try_job(server: LiveStack, spec: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{PATH}", params={"probe": "true"}, json=spec, timeout=150)


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
