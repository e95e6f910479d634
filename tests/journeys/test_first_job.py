"""The first hour with the server, as a tutorial: upload rows, submit a job, watch it, steer it, fetch what it learned.

Everything here runs for real: API, dispatcher, Redis, Celery worker, and the engine on a tiny random model.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from api.client import ApiError, AsyncGrpo
from api.client.download import choose, download
from tests.stack import LiveStack, job_spec, wait_for


def test_a_job_trains_and_its_checkpoint_loads(server: LiveStack, tmp_path: Path) -> None:
    # Rows go up first; the server reads every one of them.
    training_file = server.upload(rows=32)

    # A job is a JSON object. It is accepted at once and waits for a worker.
    job = server.client.create_job(job_spec(training_file, num_steps=4))
    assert job.status in ("queued", "running")
    assert job.resolved["kl"]["estimator"] == "k3"

    # A stream tells each step as it completes, and ends with the job.
    seen = [(event.type, event.data.get("step")) for event in server.client.stream_metrics(job.id)]
    assert seen == [*(("step.completed", step) for step in (1, 2, 3, 4)), ("job.finished", None)]
    job = server.client.job(job.id)
    assert (job.status, job.error, job.progress.step) == ("succeeded", None, 4)

    # Each step left its telemetry, once and in order. The KL of step 1 is measured before any update: it is 0.
    rows = server.client.metrics(job.id)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert rows[0].metrics["kl/ref/k3/mean"] == 0.0
    assert all(row.metrics["beta/applied"] == 0.04 for row in rows)

    # The events tell the story.
    story = [event.event for event in server.client.events(job.id).data]
    assert story[0] == "job.created"
    assert story[-1] == "job.succeeded"
    assert "checkpoint.saved" in story

    # The weights load as they are, and they have moved.
    checkpoint = choose(server.client.checkpoints(job.id), None)
    assert checkpoint.step_number == 4
    folder = download(server.client, checkpoint, tmp_path / "model")
    tuned = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(server.settings.model_dir / "tiny")
    assert any((a != b).any() for a, b in zip(tuned.parameters(), base.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answer = tuned.generate(**tokenizer("1+1=", return_tensors="pt"), max_new_tokens=4)
    assert answer.shape[-1] > 4


def test_a_running_job_takes_another_beta_and_can_be_cancelled(server: LiveStack) -> None:
    job = server.client.create_job(job_spec(server.upload(), num_steps=400))
    wait_for(lambda: server.steps(job.id), "the first step")
    command = server.client.set_control(job.id, beta=0.5)
    assert command.status == "pending"
    applied = wait_for(
        lambda: [event for event in server.client.events(job.id, limit=1000).data if event.event == "control.applied"], "the answer"
    )[0]
    step = applied.data["effective_step"]
    wait_for(lambda: server.steps(job.id)[-1] >= step, "the step it takes effect at")
    row = server.client.metrics(job.id, step_from=step, step_to=step)[0]
    assert row.metrics["beta/applied"] == 0.5

    # Cancel ends the engine within ten seconds; no process is left.
    server.client.cancel(job.id)
    assert server.client.wait(job.id, timeout_s=10).status == "cancelled"
    assert server.engines(job.id) == []


def test_a_paused_job_frees_the_worker_and_goes_on_from_its_checkpoint(server: LiveStack) -> None:
    job = server.client.create_job(job_spec(server.upload(), num_steps=12))
    wait_for(lambda: server.steps(job.id), "the first step")
    server.client.pause(job.id)
    wait_for(lambda: server.client.job(job.id).status == "paused", "the pause")
    paused = server.client.job(job.id)
    wait_for(lambda: not server.engines(job.id), "the engine to leave")
    server.client.resume(job.id)
    done = server.client.wait(job.id, timeout_s=120)
    assert (done.status, done.attempt) == ("succeeded", paused.attempt + 1)
    assert server.steps(job.id) == list(range(1, 13))


def test_the_same_from_asyncio(server: LiveStack, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(16)))

    async def story() -> list[str]:
        async with AsyncGrpo(server.url) as client:
            file = await client.upload(rows)
            job = await client.create_job(job_spec(file.id, num_steps=1))
            seen = [event.type async for event in client.stream_metrics(job.id)]
            assert (await client.wait(job.id)).status == "succeeded"
            assert [row.step for row in await client.metrics(job.id)] == [1]
            return seen

    assert asyncio.run(story()) == ["step.completed", "job.finished"]


def test_a_mistake_is_answered_with_the_field_and_the_remedy(server: LiveStack) -> None:
    spec = job_spec(server.upload(), beta=-1.0)
    with pytest.raises(ApiError) as refused:
        server.client.create_job(spec)
    assert refused.value.status == 422
    assert refused.value.param == "method.grpo.beta"


def test_the_same_key_makes_one_job(server: LiveStack) -> None:
    spec = job_spec(server.upload(), num_steps=1)
    first = server.client.create_job(spec, idempotency_key="once")
    again = server.client.create_job(json.loads(json.dumps(spec)), idempotency_key="once")
    assert again.id == first.id
    server.client.cancel(first.id)
    assert server.client.wait(first.id, timeout_s=30).status == "cancelled"
