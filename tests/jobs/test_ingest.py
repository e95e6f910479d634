"""Engine events reach the database exactly once, in order, whatever the stream loses, repeats or reorders."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.event import EngineEvent
from jobs.event_files import read_events
from jobs.ledger import Ledger
from jobs.lifecycle import State
from tests.jobs.makers import FakeAttempt, make_job
from tests.jobs.test_ledger import start


def steps_of(ledger: Ledger, job_id: str) -> list[tuple[int, int, int]]:
    """(step, epoch, seq) of what counts."""
    return [(row.step, row.epoch, row.seq) for row in ledger.metrics(job_id)]


def restart(ledger: Ledger, attempt: FakeAttempt) -> FakeAttempt:
    """The attempt crashes and the next one is claimed."""
    attempt.end("failed", "crash", retryable=True)
    outcome = ledger.artifacts.outcome(attempt.job_id, attempt.epoch)
    assert outcome is not None
    assert ledger.settle(attempt.job_id, attempt.epoch, outcome) is not None
    return start(ledger, attempt.job_id)


def test_telemetry_arrives_and_the_job_shows_its_latest_step(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    attempt.event("engine.started")
    attempt.step(1)
    attempt.step(2, {"reward/mean": 0.5, "grad_norm/total": math.nan, "x": 0.1 + 0.2})
    result = any_ledger.ingest(job.id, attempt.events)
    assert (result.taken, result.last, result.has_gap) == (3, (1, 3), False)
    shown = any_ledger.get_job(job.id)
    assert (shown.step, shown.activity, shown.phase) == (2, "step.completed", "training")
    assert shown.metrics["kl/ref/k3/mean"] == 0.02
    assert shown.metrics["grad_norm/total"] == {"value": None, "nonfinite": "nan"}
    assert shown.beta == {"value": 0.04, "step": 2}
    rows = any_ledger.metrics(job.id, ["reward/mean"], 1, 2)
    assert [(row.step, row.metrics) for row in rows] == [(1, {}), (2, {"reward/mean": 0.5})]
    chosen = any_ledger.metrics(job.id, ["grad_norm/total", "kl/ref/k3/mean", "none", "x"], 2)[0].metrics
    assert chosen == {"grad_norm/total": {"value": None, "nonfinite": "nan"}, "kl/ref/k3/mean": 0.02, "x": 0.1 + 0.2}
    assert any_ledger.metrics(job.id, ["kl/ref/k3/mean", 'odd"name'], 2)[0].metrics == {"kl/ref/k3/mean": 0.02}
    assert [row.step for row in any_ledger.metrics(job.id, step_from=2)] == [2]
    assert [row.step for row in any_ledger.metrics(job.id, limit=1)] == [1]
    assert [row.step for row in any_ledger.metrics(job.id, limit=1, newest=True)] == [2]
    assert [row.step for row in any_ledger.metrics(job.id, time_from=1003.0)] == [2]


def test_repeats_change_nothing(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    events = [attempt.step(1), attempt.event("beta.changed", 1), attempt.step(2)]
    any_ledger.ingest(job.id, events)
    history = any_ledger.events(job.id)
    assert any_ledger.ingest(job.id, events).taken == 0
    assert any_ledger.ingest(job.id, [*events, attempt.step(3)]).taken == 1
    assert any_ledger.events(job.id) == history
    assert steps_of(any_ledger, job.id) == [(1, 1, 1), (2, 1, 3), (3, 1, 4)]


def test_a_gap_stops_the_stream_and_the_file_fills_it(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    events = [attempt.step(number) for number in range(1, 6)]
    result = any_ledger.ingest(job.id, [events[0], events[2], events[3]])
    assert (result.taken, result.has_gap) == (1, True)
    assert steps_of(any_ledger, job.id) == [(1, 1, 1)]
    from_file, _ = read_events(any_ledger.artifacts.events_path(job.id, 1))
    assert any_ledger.ingest(job.id, from_file, from_file=True).taken == 4
    assert steps_of(any_ledger, job.id) == [(number, 1, number) for number in range(1, 6)]
    assert any_ledger.integrity(job.id).missing == []


def test_what_the_file_itself_lost_is_told_and_does_not_block(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    attempt.step(1)
    attempt.step(2, is_written=False)
    with any_ledger.artifacts.events_path(job.id, 1).open("ab") as stream:
        stream.write(b'{"epoch":1,"seq":2,"ti\xff\n')
    attempt.step(3)
    events, offset = read_events(any_ledger.artifacts.events_path(job.id, 1))
    assert offset == any_ledger.artifacts.events_path(job.id, 1).stat().st_size
    any_ledger.ingest(job.id, events, from_file=True)
    integrity = any_ledger.integrity(job.id)
    assert (integrity.steps, integrity.last_step, integrity.missing, integrity.gaps) == (2, 3, [2], 1)
    assert [event.data for event in any_ledger.events(job.id, types=["telemetry.gap"]).data] == [{"first": 2, "last": 2}]


def test_a_line_being_written_waits_for_its_end(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    attempt.step(1)
    path = any_ledger.artifacts.events_path(job.id, 1)
    line = attempt.step(2, is_written=False).to_line()
    with path.open("a") as stream:
        stream.write(line[:20])
    events, offset = read_events(path)
    assert [event.seq for event in events] == [1]
    with path.open("a") as stream:
        stream.write(line[20:] + "\n")
    events, _ = read_events(path, offset)
    assert [event.seq for event in events] == [2]


def test_a_rewind_supersedes_what_came_after(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    first = start(any_ledger, job.id)
    first.step(1)
    first.step(2)
    first.checkpoint(2)
    first.step(3)
    first.checkpoint(3, "published")
    any_ledger.ingest(job.id, first.events)
    assert [record.step for record in any_ledger.checkpoints(job.id).data] == [3]
    second = restart(any_ledger, first)
    second.event("run.rewound", 2, to_step=2)
    any_ledger.ingest(job.id, second.events)
    shown = any_ledger.get_job(job.id)
    assert (shown.step, shown.metrics["kl/ref/k3/mean"]) == (2, 0.02)
    assert any_ledger.checkpoints(job.id).data == []
    assert [record.step for record in any_ledger.checkpoints(job.id, with_superseded=True).data] == [3]
    assert [record.step for record in any_ledger.resume_candidates(job.id)] == [2]
    any_ledger.ingest(job.id, [second.step(3), second.step(4)])
    assert steps_of(any_ledger, job.id) == [(1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 2, 3)]
    rows = any_ledger.metrics(job.id, with_superseded=True)
    assert [(row.epoch, row.seq, row.superseded) for row in rows if row.step == 3] == [(1, 4, True), (2, 2, False)]
    assert any_ledger.integrity(job.id).superseded == 1
    assert [(row.epoch, row.seq) for row in any_ledger.metrics_after(job.id, (1, 4))] == [(2, 2), (2, 3)]


def test_an_attempt_that_was_replaced_is_fenced(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    first = start(any_ledger, job.id)
    any_ledger.ingest(job.id, [first.step(1)])
    second = restart(any_ledger, first)
    any_ledger.ingest(job.id, [second.event("run.rewound", 0, to_step=0), second.step(1)])
    late = [first.step(2), first.checkpoint(2), first.checkpoint(2, "published")]
    assert any_ledger.ingest(job.id, late).taken == 0
    assert any_ledger.ingest(job.id, late, from_file=True).taken == 0
    assert steps_of(any_ledger, job.id) == [(1, 2, 2)]
    assert any_ledger.resume_candidates(job.id) == []
    assert any_ledger.checkpoints(job.id, with_superseded=True).data == []


def test_a_finished_job_takes_nothing_more(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    any_ledger.ingest(job.id, [attempt.step(1)])
    attempt.end("succeeded", "completed")
    outcome = any_ledger.artifacts.outcome(job.id, 1)
    assert outcome is not None
    any_ledger.settle(job.id, 1, outcome)
    assert any_ledger.ingest(job.id, [attempt.step(2)]).taken == 0
    assert any_ledger.get_job(job.id).step == 1


def test_checkpoints_carry_what_gates_need(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    any_ledger.ingest(job.id, [attempt.checkpoint(step, "published") for step in (1, 2, 3)])
    page = any_ledger.checkpoints(job.id, limit=2)
    assert [record.step for record in page.data] == [3, 2]
    assert page.has_more
    newest = page.data[0]
    assert newest.id.startswith("ftckpt-")
    assert (newest.ref_kl, newest.reward, newest.beta, newest.epoch, newest.name) == (0.5, 0.25, 0.04, 1, "step-000003")
    assert newest.files[0]["name"] == "model.safetensors"
    assert any_ledger.get_checkpoint(newest.id) == newest
    assert [record.step for record in any_ledger.checkpoints(job.id, after=page.data[-1].id).data] == [1]
    any_ledger.mark_checkpoint(newest.id, pinned=True)
    assert any_ledger.get_checkpoint(newest.id).pinned
    any_ledger.mark_checkpoint(newest.id, is_deleted=True)
    assert [record.step for record in any_ledger.checkpoints(job.id).data] == [2, 1]


@pytest.mark.parametrize(
    ("kind", "step", "data"),
    [
        ("step.completed", None, {"metrics": {}}),
        ("step.completed", 1, {"metrics": 3}),
        ("checkpoint.saved", 1, {"name": "../../etc", "step": 1, "kind": "published", "files": [], "bytes": 1}),
        ("run.rewound", 1, {}),
        ("control.applied", 1, {"command": "x"}),
    ],
)
def test_an_event_that_breaks_its_format_is_kept_and_told(any_ledger: Ledger, kind: str, step: int | None, data: dict[str, Any]) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    any_ledger.ingest(job.id, [attempt.event(kind, step, data), attempt.step(1)])
    assert steps_of(any_ledger, job.id) == [(1, 1, 2)]
    found = any_ledger.events(job.id, types=[kind, "telemetry.invalid"]).data
    assert [event.type for event in found] == ["telemetry.invalid", kind]


def test_events_page_both_ways(any_ledger: Ledger) -> None:
    job, other = make_job(any_ledger), make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    any_ledger.ingest(job.id, [attempt.event("beta.changed", 1, old=1.0) for _ in range(3)])
    make_job(any_ledger)
    everything = any_ledger.events(job.id, limit=100).data
    assert [event.type for event in everything] == ["job.created", "job.dispatched", "job.running"] + ["beta.changed"] * 3
    page = any_ledger.events(job.id, after=everything[1].number, limit=2)
    assert page.data == everything[2:4]
    assert page.has_more
    assert any_ledger.events(job.id, order="desc", limit=2).data == everything[:-3:-1]
    assert any_ledger.event_number(everything[0].id) == everything[0].number
    assert [event.type for event in any_ledger.events(other.id).data] == ["job.created"]
    for wrong in ("ftevent-", "ftevent--1", "x", "ftevent-²", "ftevent-" + "9" * 40):
        with pytest.raises(InvalidRequest, match="event id"):
            any_ledger.event_number(wrong)


# Whatever the stream does


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A number of events, and batches of their indices: lost, repeated, out of order."""
    number = draw(st.integers(1, 30))
    batches = draw(st.lists(st.lists(st.integers(0, number - 1), max_size=12), max_size=12))
    return number, batches


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(delivery=deliveries(), rewinds=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 10)), max_size=3))
def test_any_delivery_ends_like_reading_the_file_once(
    ledger: Ledger, delivery: tuple[int, list[list[int]]], rewinds: list[tuple[int, int]]
) -> None:
    number, batches = delivery
    job, twin = make_job(ledger), make_job(ledger)
    attempt, straight = start(ledger, job.id), start(ledger, twin.id)
    step, backs = 0, dict(rewinds)
    expected: dict[int, int] = {}
    for index in range(number):
        if index in backs and backs[index] <= step:
            step = backs[index]
            attempt.event("run.rewound", step, to_step=step)
            expected = {kept: seq for kept, seq in expected.items() if kept <= step}
        else:
            step += 1
            attempt.step(step)
            expected[step] = attempt.seq
    for batch in batches:
        ledger.ingest(job.id, [attempt.events[index] for index in batch])
        count = len(ledger.metrics(job.id, with_superseded=True))
        assert count <= number
    everything, _ = read_events(ledger.artifacts.events_path(job.id, 1))
    ledger.ingest(job.id, everything, from_file=True)
    ledger.ingest(twin.id, [EngineEvent.model_validate_json(json.dumps(event.model_dump())) for event in everything])
    assert {row.step: row.seq for row in ledger.metrics(job.id)} == expected
    assert steps_of(ledger, job.id) == steps_of(ledger, twin.id)
    assert ledger.get_job(job.id).step == max(expected, default=0) == ledger.get_job(twin.id).step
    assert ledger.get_job(job.id).latest == ledger.get_job(twin.id).latest
    assert ledger.last_ingested(job.id) == (1, number)
    assert ledger.integrity(job.id).missing == []
    assert straight.epoch == 1
    assert ledger.get_job(job.id).state is State.RUNNING
