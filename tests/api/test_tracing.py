"""A request's `traceparent`: kept with what it creates, and a span for each request where there is a collector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.sse import StreamLimits
from jobs.settings import Settings, SettingsError
from jobs.traces import TraceContext, job_span
from tests.api.conftest import Server, eventually, spec, upload
from tests.collector import Collector
from tests.conftest import free_port
from tests.listener import listen

GIVEN = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_what_is_no_traceparent_is_ignored(text: str) -> None:
    found = TraceContext.parse(text)
    assert found is None or text.strip().startswith(f"{text.strip()[:2]}-{found.trace_id}-{found.span_id}-")


BROKEN = [
    f"ff-{'a' * 32}-{'b' * 16}-01",
    f"00-{'0' * 32}-{'b' * 16}-01",
    f"00-{'a' * 32}-{'0' * 16}-01",
    f"00-{'a' * 32}-{'b' * 16}-01-x",
    f"00-{'A' * 32}-{'b' * 16}-01",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_traceparent_that_breaks_the_rules_of_w3c_is_ignored(text: str) -> None:
    assert TraceContext.parse(text) is None


def test_a_later_version_is_read_by_what_is_known_of_it() -> None:
    assert TraceContext.parse(f"cc-{GIVEN.trace_id}-{GIVEN.span_id}-01-what-comes") == GIVEN
    assert TraceContext.parse(f"00-{GIVEN.trace_id}-{GIVEN.span_id}-02") == replace(GIVEN, is_sampled=False)
    assert TraceContext.parse(str(GIVEN)) == GIVEN


def test_a_callers_context_is_kept_with_the_job_without_a_collector(client: httpx.Client, server: Server) -> None:
    body = spec(upload(client))
    traced = client.post("/v1/fine_tuning/jobs", json=body, headers={"traceparent": str(GIVEN)}).json()
    plain = client.post("/v1/fine_tuning/jobs", json=body, headers={"traceparent": "nonsense"}).json()
    first, second = (client.get(f"/v1/fine_tuning/jobs/{job['id']}/events").json()["data"][0] for job in (traced, plain))
    assert first["data"] == {"traceparent": str(GIVEN)}
    assert second["data"] == {}
    ledger = server.app.state.services.ledger
    assert ledger.trace_of(traced["id"]) == job_span(traced["id"], GIVEN)
    assert ledger.trace_of(plain["id"]).trace_id not in (GIVEN.trace_id, ledger.trace_of(traced["id"]).trace_id)


def test_requests_are_spans_and_times(api_settings: Settings, limits: StreamLimits) -> None:
    collector = Collector()
    with listen(collector.hear) as address:
        server = Server(replace(api_settings, otel_endpoint=address, otel_interval_s=0.1, otel_reads=0.0), limits)
        with server.client(headers={"x-request-id": "mine"}) as client:
            assert client.get("/v1/fine_tuning/jobs/ftjob-none", headers={"traceparent": str(GIVEN)}).status_code == 404
            assert client.get("/v1/fine_tuning/jobs/ftjob-none").status_code == 404
            assert client.get("/healthz").status_code == 200
            eventually(lambda: "http.server.request.duration" in collector.readings)
        server.stop()
    (seen,) = collector.spans  # the other read got none: `otel_reads` is 0
    assert seen.span.name == "GET /v1/fine_tuning/jobs/{job_id}"
    assert seen.span.parent_span_id.hex() == GIVEN.span_id
    assert seen.facts["http.response.status_code"] == 404
    assert seen.facts["grpo.request_id"] == "mine"
    counted = {facts["http.route"]: number for number, facts in collector.readings["http.server.request.duration"]}
    assert counted == {"/v1/fine_tuning/jobs/{job_id}": 2}


def test_without_its_collector_the_server_serves_and_ends(api_settings: Settings, limits: StreamLimits) -> None:
    server = Server(replace(api_settings, otel_endpoint=f"http://127.0.0.1:{free_port()}", otel_interval_s=0.05, otel_reads=1.0), limits)
    with server.client() as client:
        assert [client.get("/v1/fine_tuning/jobs").status_code for _ in range(20)] == [200] * 20
    server.stop()


def test_settings_that_make_no_sense_are_named(tmp_path: Path) -> None:
    for name, value in (("otel_endpoint", "collector:4318"), ("otel_headers", ("secret",)), ("otel_reads", 1.5)):
        with pytest.raises(SettingsError, match=f"GRPO_{name.upper()}"):
            Settings(data_dir=tmp_path, **{name: value}).resolved()
