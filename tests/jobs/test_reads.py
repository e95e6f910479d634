"""The short ways of reading say what the long ones say, on both databases."""

from __future__ import annotations

import json

import sqlalchemy as sa
from pydantic_core import from_json

from grpo_engine.contract.event import EngineEvent
from jobs.ledger import Ledger
from jobs.ledger.lineage import LineageRecord
from jobs.tables import lineage, sweep_members, sweeps
from tests.jobs.makers import make_job


def test_a_job_comes_with_its_line(any_ledger: Ledger) -> None:
    root, first, second, alone = (make_job(any_ledger).id for _ in range(4))
    with any_ledger.database.write() as connection:
        for fork in (first, second):
            connection.execute(sa.insert(lineage).values(job_id=fork, parent_job=root, parent_checkpoint="ftckpt-x", root_model="tiny"))
        connection.execute(sa.insert(sweeps).values(id="ftsweep-1", project="default", created_at=1.0, name=None, request="{}"))
        connection.execute(sa.insert(sweep_members).values(job_id=second, sweep_id="ftsweep-1", number=1, name="beta 0.1"))
    for job_id in (root, first, second, alone):
        job, line = any_ledger.job_with_lineage(job_id)
        assert job == any_ledger.get_job(job_id)
        assert line == any_ledger.lineages([job_id])[job_id]
    assert any_ledger.job_with_lineage(root)[1].forks == (first, second)
    assert any_ledger.job_with_lineage(second)[1] == LineageRecord(root, "ftckpt-x", "tiny", (), "ftsweep-1", "beta 0.1")


def test_points_passed_on_unread_are_those_that_are_read(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    assert any_ledger.dispatch(job.id, from_epoch=0) is not None
    assert any_ledger.mark_running(job.id, 1, "worker-1") is not None
    readings = [
        {"reward/mean": 0.1, "loss/total": 1e-07},
        {"reward/mean": {"value": None, "nonfinite": "nan"}},
        {"loss/total": -3},
        {"reward/mean": 1e300, "loss/total": {"value": None, "nonfinite": "-inf"}},
    ]
    events = [
        EngineEvent(epoch=1, seq=n, time=1000.5 + n, type="step.completed", step=n, message="", data={"metrics": found, "beta": {}})
        for n, found in enumerate(readings, 1)
    ]
    assert any_ledger.ingest(job.id, events).taken == 4
    names = ["loss/total", "reward/mean"]
    rows = any_ledger.metrics(job.id, names, 1, 3, time_from=1001.0, limit=10)
    texts = any_ledger.metric_texts(job.id, names, 1, 3, time_from=1001.0, limit=10)
    assert texts is not None
    unread = [
        (step, epoch, seq, at, [None if text is None else from_json(text) for text in found]) for step, epoch, seq, at, *found in texts
    ]
    assert unread == [(row.step, row.epoch, row.seq, row.time, [row.metrics.get(name) for name in names]) for row in rows]
    assert any_ledger.metric_texts(job.id, ['odd "name"'], limit=1) is None
    assert json.dumps(unread)
