"""Long series from folds are those from the steps themselves, whatever was rewound, and on a database from before."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from api.buckets import series_json
from grpo_engine.contract.event import EngineEvent, encode_nonfinite
from grpo_engine.contract.view import MetricSeries
from jobs.ledger import Ledger
from jobs.rollups import Fold, add_fold, add_step, bucket_width, fold_of, fold_steps
from jobs.tables import rollups
from tests.jobs.makers import make_job

KL, LOSS = "kl/ref/k3/mean", "loss/total"


def running(ledger: Ledger) -> str:
    job = make_job(ledger)
    dispatched = ledger.dispatch(job.id, from_epoch=job.epoch)
    assert dispatched is not None
    assert ledger.mark_running(job.id, dispatched.epoch, "worker-1") is not None
    return job.id


class Teller:
    """Says engine events of attempt 1 in order."""

    def __init__(self, ledger: Ledger, job_id: str) -> None:
        self.ledger, self.job_id, self.seq = ledger, job_id, 0

    def say(self, kind: str, step: int | None, data: dict[str, Any]) -> EngineEvent:
        self.seq += 1
        return EngineEvent(epoch=1, seq=self.seq, time=1000.0 + self.seq, type=kind, step=step, message=kind, data=data)

    def steps(self, first: int, last: int, size: int = 100, scale: float = 1.0) -> None:
        events = [
            self.say("step.completed", step, {"metrics": {KL: scale * math.sin(step), **({LOSS: math.nan} if step % 5 else {LOSS: step})}})
            for step in range(first, last + 1)
        ]
        for start in range(0, len(events), size):
            part = events[start : start + size]
            assert self.ledger.ingest(self.job_id, part).taken == len(part)

    def rewind(self, to_step: int) -> None:
        assert self.ledger.ingest(self.job_id, [self.say("run.rewound", to_step, {"to_step": to_step})]).taken == 1


def from_steps(ledger: Ledger, job_id: str, names: list[str] | None, width: int, low: int, high: int) -> list[Fold]:
    """What the buckets must be."""
    rows = ledger.metrics(job_id, names, low, high)
    return [fold for _, fold in sorted(fold_steps(width, ((row.step, row.metrics) for row in rows)).items())]


@pytest.mark.parametrize("size", [6, 700])
def test_folds_say_what_the_steps_say(any_ledger: Ledger, size: int) -> None:
    job_id = running(any_ledger)
    teller = Teller(any_ledger, job_id)
    teller.steps(1, 150, size)
    teller.rewind(70)
    teller.steps(71, 75, size, scale=2.0)
    teller.rewind(3)
    teller.steps(4, 200, size, scale=3.0)
    teller.steps(203, 700, 700)
    with any_ledger.database.read() as connection:
        held = connection.execute(sa.select(rollups.c.width, sa.func.count()).group_by(rollups.c.width).order_by(rollups.c.width)).all()
    assert [tuple(row) for row in held] == [(8, 87), (64, 10), (512, 1)]
    for names in (None, [KL], [LOSS, KL], ["reward/mean"]):
        for resolution in (1, 10, 100, 1000):
            for low, high in ((1, 700), (5, 131), (64, 640)):
                found = any_ledger.sampled(job_id, names, low, high, resolution=resolution)
                expected = from_steps(any_ledger, job_id, names, found.width, low, high)
                assert [bucket for bucket in found.buckets if bucket] == [bucket for bucket in expected if bucket]
                assert len(found.buckets) <= resolution


def test_a_database_from_before_is_read_from_its_steps(ledger: Ledger) -> None:
    job_id = running(ledger)
    teller = Teller(ledger, job_id)
    teller.steps(1, 100)
    whole = ledger.sampled(job_id, resolution=5)
    with ledger.database.write() as connection:
        connection.execute(sa.delete(rollups).where(rollups.c.number < 8))
    assert ledger.sampled(job_id, resolution=5) == whole
    teller.steps(101, 600)
    expected = from_steps(ledger, job_id, None, 512, 1, 600)
    assert ledger.sampled(job_id, resolution=2).buckets == expected
    by_time = ledger.sampled(job_id, time_from=1010, time_to=1020, resolution=100)
    assert [bucket[KL][1] for bucket in by_time.buckets] == list(range(10, 21))


readings = st.one_of(st.floats(), st.integers(-5, 5)).map(encode_nonfinite)


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), readings), max_size=60), st.integers(0, 60))
def test_folding_in_parts_is_folding_at_once(steps: list[dict[str, Any]], cut: int) -> None:
    whole: Fold = {}
    parts: tuple[Fold, Fold] = ({}, {})
    for step, metrics in enumerate(steps, start=1):
        add_step(whole, step, metrics)
        add_step(parts[step > cut], step, metrics)
    add_fold(parts[0], parts[1])
    assert parts[0] == whole


@given(st.lists(st.floats(), min_size=1, max_size=200), st.integers(1, 50))
def test_buckets_lose_no_step_and_no_extreme(values: list[float], resolution: int) -> None:
    points = list(enumerate(values, start=3))
    width = bucket_width(points[0][0], points[-1][0], resolution)
    folds = fold_steps(width, ((step, {KL: encode_nonfinite(value)}) for step, value in points))
    series = MetricSeries.model_validate(json.loads(series_json([folds[number] for number in sorted(folds)], [KL]))[0])
    assert len(series.buckets) <= resolution
    assert sum(bucket.count for bucket in series.buckets) == len(points)
    finite = [value for value in values if math.isfinite(value)]
    highest = [bucket.max.value for bucket in series.buckets if bucket.max is not None]
    lowest = [bucket.min.value for bucket in series.buckets if bucket.min is not None]
    assert max((value for value in highest if isinstance(value, float)), default=None) == max(finite, default=None)
    assert min((value for value in lowest if isinstance(value, float)), default=None) == min(finite, default=None)
    assert series.buckets[0].first.step == points[0][0]
    assert series.buckets[-1].last.step == points[-1][0]


@pytest.mark.parametrize(("width", "fold"), [(1, 1), (4, 1), (8, 8), (32, 8), (64, 64), (256, 64), (1024, 512), (2**20, 512)])
def test_a_bucket_consists_of_whole_folds(width: int, fold: int) -> None:
    assert fold_of(width) == fold
    assert width % fold == 0
