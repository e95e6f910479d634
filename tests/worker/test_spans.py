"""What the worker tells an OpenTelemetry collector, and that a collector which hangs holds no attempt up."""

from __future__ import annotations

import threading
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import Status

from jobs.queue import Publisher
from jobs.traces import TraceContext, job_span
from tests.collector import Collector
from tests.listener import listen
from tests.worker.room import Room, Valkey, wait_for

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def test_the_context_comes_with_celerys_message(tmp_path: Path, shared_valkey: Valkey) -> None:
    collector = Collector()
    with listen(collector.hear) as address:
        room = Room(tmp_path, shared_valkey, otel_endpoint=address)
        room.worker()
        failing, alone = room.job("steps=2 exit=1@2"), room.job("steps=1")
        publisher = Publisher(room.settings)
        publisher.enqueue(failing.job_id, 1, trace=PARENT)
        publisher.close()
        wait_for(lambda: collector.named("attempt", PARENT.trace_id), "the attempt's span")
        room.publish(alone)
        own = job_span(alone.job_id, None)
        wait_for(lambda: collector.named("attempt", own.trace_id), "the other attempt's span")
        room.close()
    (attempt,) = collector.named("attempt", PARENT.trace_id)
    assert attempt.span.parent_span_id.hex() == PARENT.span_id
    assert attempt.span.status.code == Status.STATUS_CODE_ERROR
    assert (attempt.facts["grpo.job.id"], attempt.facts["grpo.outcome"]) == (failing.job_id, "failed")
    assert {seen.span.parent_span_id for seen in collector.named("step", PARENT.trace_id)} == {attempt.span.span_id}
    # Without a context the attempts of a job meet below its own span all the same.
    (other,) = collector.named("attempt", own.trace_id)
    assert other.span.parent_span_id.hex() == own.span_id


def test_a_collector_that_hangs_holds_no_attempt_up(tmp_path: Path, shared_valkey: Valkey) -> None:
    collector = Collector(hold=threading.Event())
    with listen(collector.hear) as address:
        room = Room(tmp_path, shared_valkey, otel_endpoint=address, otel_interval_s=0.1)
        room.worker()
        for attempt in (room.job("steps=2"), room.job("steps=2")):
            room.publish(attempt)
            outcome = wait_for(attempt.outcome, "the verdict")
            assert outcome.status == "succeeded"
            assert room.steps(attempt) == [1, 2]
        assert collector.keys == {""}
        assert collector.hold is not None
        collector.hold.set()
        room.close()
