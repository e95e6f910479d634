"""One trace leads from the caller's request over Celery to each step of the job, through three processes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.collector import Collector
from tests.listener import listen
from tests.stack import job_spec, live_stack, wait_for

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@pytest.mark.slow
def test_a_job_is_one_trace_from_the_callers_span_to_each_step(tmp_path: Path) -> None:
    collector = Collector()
    otel = {"otel_headers": ("x-api-key=secret",), "otel_interval_s": 0.5, "otel_reads": 0.0}
    with listen(collector.hear) as address, live_stack(tmp_path, otel_endpoint=f"{address}/otlp", **otel) as server:
        body = job_spec(server.upload(), num_steps=3)
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        job_id = httpx.post(f"{server.url}/v1/fine_tuning/jobs", json=body, headers=headers).json()["id"]
        assert server.client.wait(job_id).status == "succeeded"
        wait_for(lambda: collector.named("job", TRACE), "the span of the job")
        wait_for(lambda: collector.named("attempt", TRACE), "the span of the attempt")
        history = server.client.events(job_id).data
    assert collector.keys == {"secret"}
    (request,) = collector.named("POST /v1/fine_tuning/jobs", TRACE)
    (job,) = collector.named("job", TRACE)
    (published,) = collector.named("publish attempt", TRACE)
    (attempt,) = collector.named("attempt", TRACE)
    steps = collector.named("step", TRACE)
    services = [seen.service for seen in (request, job, published, attempt, *steps)]
    assert services == ["grpo-api", "grpo-dispatcher", "grpo-dispatcher", "grpo-worker", *["grpo-worker"] * 3]
    # Each is the child of the one before.
    assert request.span.parent_span_id.hex() == CALLER
    assert job.span.parent_span_id == request.span.span_id
    assert published.span.parent_span_id == job.span.span_id
    assert attempt.span.parent_span_id == published.span.span_id
    assert {seen.span.parent_span_id for seen in steps} == {attempt.span.span_id}
    # The history leads to the trace as well.
    told = {event.event: event.data.get("traceparent") for event in history}
    assert told["job.created"] == f"00-{TRACE}-{request.span.span_id.hex()}-01"
    assert told["job.dispatched"] == f"00-{TRACE}-{job.span.span_id.hex()}-01"
    # They say what happened, and when.
    assert [seen.facts["grpo.step"] for seen in steps] == [1, 2, 3]
    assert [seen.facts["grpo.beta.applied"] for seen in steps] == [0.04] * 3
    assert steps[0].facts["grpo.kl.ref.k3.mean"] == 0.0
    assert "checkpoint.saved" in {event.name for event in attempt.span.events}
    assert request.facts["http.response.status_code"] == 201
    spans = [seen.span for seen in (request, job, published, attempt, *steps)]
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    assert all(attempt.span.start_time_unix_nano <= seen.span.end_time_unix_nano <= attempt.span.end_time_unix_nano for seen in steps)
    assert not any(span.status.code == Status.STATUS_CODE_ERROR for span in spans)
    # Readings come as metrics, with the job they belong to.
    for name in ("grpo.kl.ref.k3.mean", "grpo.beta.applied", "grpo.reward.mean"):
        reading, facts = collector.readings[name][-1]
        assert facts == {"grpo.job.id": job_id, "grpo.model": "tiny"}
        assert reading == steps[-1].facts[name]
    assert collector.readings["grpo.steps"][-1][0] == 3
