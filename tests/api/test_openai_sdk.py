"""The official openai client drives the server: what its users know works as they know it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import openai
import pytest

from api.sse import StreamLimits
from jobs.settings import Settings
from tests.api.conftest import ROWS, Hand, Server, event, jsonl, spec, step_event

Sdk = openai.OpenAI


@pytest.fixture
def sdk(server: Server) -> Iterator[Sdk]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        yield client


def file_of(sdk: Sdk) -> str:
    return sdk.files.create(file=("sums.jsonl", jsonl(ROWS)), purpose="fine-tune").id


def create(sdk: Sdk, **grpo: Any) -> openai.types.fine_tuning.FineTuningJob:
    return sdk.fine_tuning.jobs.create(**cast(Any, spec(file_of(sdk), **grpo)))


def test_files(sdk: Sdk) -> None:
    made = sdk.files.create(file=("sums.jsonl", jsonl(ROWS)), purpose="fine-tune")
    assert (made.object, made.status, made.bytes) == ("file", "processed", len(jsonl(ROWS)))
    assert sdk.files.retrieve(made.id) == made
    assert sdk.files.content(made.id).content == jsonl(ROWS)
    for _ in range(4):
        file_of(sdk)
    assert len([file.id for file in sdk.files.list(limit=2)]) == 5
    assert sdk.files.delete(made.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(made.id)


def test_create_retrieve_list_cancel(sdk: Sdk) -> None:
    job = create(sdk)
    assert (job.object, job.status, job.finished_at, job.error) == ("fine_tuning.job", "queued", None, None)
    assert isinstance(job.created_at, int)
    assert cast(Any, job).resolved["kl"]["estimator"] == "k3"
    assert sdk.fine_tuning.jobs.retrieve(job.id) == job
    others = [create(sdk).id for _ in range(4)]
    assert [found.id for found in sdk.fine_tuning.jobs.list(limit=2)] == [*reversed(others), job.id]
    assert sdk.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    labelled = sdk.fine_tuning.jobs.create(**cast(Any, {**spec(file_of(sdk)), "metadata": {"team": "a"}}))
    assert [found.id for found in sdk.fine_tuning.jobs.list(metadata={"team": "a"})] == [labelled.id]


def test_an_answer_validates_against_the_sdks_own_models(sdk: Sdk) -> None:
    """`method` apart: `grpo` is ours, OpenAI's type allows its own three."""
    raw = sdk.fine_tuning.jobs.with_raw_response.retrieve(create(sdk).id).http_response.json()
    openai.types.fine_tuning.FineTuningJob.model_validate({**raw, "method": None}, strict=True)


def test_pause_and_resume(sdk: Sdk) -> None:
    job = create(sdk)
    assert cast(str, sdk.fine_tuning.jobs.pause(job.id).status) == "paused"
    assert sdk.fine_tuning.jobs.resume(job.id).status == "queued"


def test_events_and_checkpoints_page_to_their_end(sdk: Sdk, hand: Hand) -> None:
    job = create(sdk)
    epoch = hand.start(job.id)
    files = [{"name": "model.safetensors", "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}]
    saved = [
        event(epoch, n, "checkpoint.saved", n, name=f"step-{n:06d}", step=n, kind="published", files=files, bytes=1) for n in range(1, 4)
    ]
    hand.ingest(job.id, *saved, step_event(epoch, 4, 4))
    hand.finish(job.id)
    events = list(sdk.fine_tuning.jobs.list_events(job.id, limit=2))
    assert len({line.id for line in events}) == len(events) >= 6
    for line in events:
        openai.types.fine_tuning.FineTuningJobEvent.model_validate(line.model_dump(), strict=True)
    checkpoints = list(sdk.fine_tuning.jobs.checkpoints.list(job.id, limit=2))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [3, 2, 1]
    done = sdk.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.fine_tuned_model) == ("succeeded", checkpoints[0].id)
    assert done.finished_at is not None
    assert done.created_at <= done.finished_at


def test_errors_are_typed_and_conflicts_are_not_retried(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=5) as sdk:
        with pytest.raises(openai.UnprocessableEntityError) as bad:
            sdk.fine_tuning.jobs.create(**cast(Any, spec("file-none")))
        assert bad.value.param == "training_file"
        assert bad.value.request_id is not None
        job = create(sdk)
        sdk.fine_tuning.jobs.cancel(job.id)
        with pytest.raises(openai.ConflictError) as conflict:
            sdk.fine_tuning.jobs.pause(job.id)
        assert conflict.value.response.request.headers["x-stainless-retry-count"] == "0"
        with pytest.raises(openai.NotFoundError):
            sdk.fine_tuning.jobs.retrieve("ftjob-none")


def test_the_sdks_stream_reader_takes_our_stream(sdk: Sdk, hand: Hand) -> None:
    job = create(sdk)
    epoch = hand.start(job.id)
    hand.ingest(job.id, *(step_event(epoch, n, n) for n in range(1, 4)))
    hand.finish(job.id)
    stream = sdk.get(f"/fine_tuning/jobs/{job.id}/metrics/stream", cast_to=cast(Any, object), stream=True, stream_cls=openai.Stream[Any])
    found = list(stream)
    assert [item["step"] for item in found[:3]] == [1, 2, 3]
    assert found[3]["status"] == "succeeded"


def test_models_and_graders(sdk: Sdk) -> None:
    assert "tiny" in {model.id for model in sdk.models.list()}
    assert sdk.models.retrieve("tiny").object == "model"
    grader = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq"}
    run = sdk.fine_tuning.alpha.graders.run(grader=cast(Any, grader), model_sample="4", item={"answer": "4"})
    assert run.reward == 1.0
    assert run.metadata.errors.other_error is False
    validated = sdk.fine_tuning.alpha.graders.validate(grader=cast(Any, grader))
    assert validated.grader is not None


def test_a_key_is_sent_and_checked(api_settings: Settings, limits: StreamLimits) -> None:
    locked = Server(replace(api_settings, api_key="secret-of-the-operator"), limits)
    try:
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="secret-of-the-operator") as sdk:
            assert list(sdk.fine_tuning.jobs.list()) == []
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong") as sdk, pytest.raises(openai.AuthenticationError):
            sdk.fine_tuning.jobs.list()
    finally:
        locked.stop()
