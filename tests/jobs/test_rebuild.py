"""A lost database comes back from the job directories, and a kept copy from the backup."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from api.app import create_app
from grpo_engine.contract.error import Conflict, InvalidRequest
from jobs.database import DatabaseDamaged
from jobs.dispatcher import Dispatcher
from jobs.ledger import IdempotencyKey, Ledger, open_ledger
from jobs.lifecycle import State
from jobs.rebuild import backup, rebuild, refuse_emptied
from jobs.settings import Settings, bare_environment
from tests.jobs.makers import FakeAttempt, make_job, make_spec, make_upload
from tests.jobs.test_ingest import restart
from tests.jobs.test_ledger import start


def finish(ledger: Ledger, attempt: FakeAttempt, status: str, reason: str) -> None:
    """The attempt ends and the ledger has taken note."""
    attempt.end(status, reason)
    outcome = ledger.artifacts.outcome(attempt.job_id, attempt.epoch)
    assert outcome is not None
    ledger.settle(attempt.job_id, attempt.epoch, outcome)


def test_jobs_metrics_and_checkpoints_come_back(settings: Settings) -> None:
    ledger = open_ledger(settings)
    key = IdempotencyKey("tester", "k", "0" * 64)
    done = ledger.create_job(make_spec(metadata={"team": "a"}), training_path=make_upload(ledger), idempotency=key)
    first = start(ledger, done.id)
    for step in (1, 2, 3):
        first.step(step)
    first.checkpoint(2)
    ledger.ingest(done.id, first.events)
    second = restart(ledger, first)
    second.event("run.rewound", 2, to_step=2)
    second.step(3)
    second.checkpoint(3, "published")
    ledger.ingest(done.id, second.events)
    finish(ledger, second, "succeeded", "completed")
    failed, cancelled, waiting = make_job(ledger), make_job(ledger), make_job(ledger)
    finish(ledger, start(ledger, failed.id), "failed", "config_error")
    doomed = start(ledger, cancelled.id)
    ledger.request(cancelled.id, "cancel")
    finish(ledger, doomed, "stopped", "cancel")
    before = {job.id: job for job in ledger.list_jobs().data}
    metrics, checkpoints = ledger.metrics(done.id, with_superseded=True), ledger.checkpoints(done.id).data
    ledger.close()
    for path in settings.data_dir.glob("grpo.db*"):
        path.unlink()

    ledger = open_ledger(settings)
    found = rebuild(ledger)
    assert (sorted(found.jobs), found.steps, found.problems) == (sorted(before), 3, [])
    after = {job.id: job for job in ledger.list_jobs().data}
    assert [job.id for job in ledger.list_jobs().data] == list(before)
    assert {job_id: job.state for job_id, job in after.items()} == {
        done.id: State.SUCCEEDED, failed.id: State.FAILED, cancelled.id: State.CANCELLED, waiting.id: State.PAUSED,
    }  # fmt: skip
    for job_id, job in after.items():
        assert (job.spec, job.created_at, job.step, job.latest) == (
            before[job_id].spec, before[job_id].created_at, before[job_id].step, before[job_id].latest,
        )  # fmt: skip
    assert ledger.metrics(done.id, with_superseded=True) == metrics
    assert ledger.checkpoints(done.id).data == checkpoints, "ids included"
    assert ledger.create_job(make_spec(), training_path=None, idempotency=key).id == done.id
    assert ledger.request(waiting.id, "resume").state is State.QUEUED
    with pytest.raises(Conflict):
        rebuild(ledger)
    ledger.close()


def test_a_directory_that_cannot_be_read_is_named_and_stops_nobody(ledger: Ledger) -> None:
    job = make_job(ledger)
    (ledger.artifacts.jobs_dir / "ftjob-empty").mkdir()
    other = ledger.artifacts.jobs_dir / "ftjob-other"
    other.mkdir()
    (other / "job.json").write_bytes((ledger.artifacts.job_dir(job.id) / "job.json").read_bytes())
    with ledger.database.write() as connection:
        for table in ("job_events", "jobs"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    found = rebuild(ledger)
    assert found.jobs == [job.id]
    assert [problem.partition(":")[0] for problem in found.problems] == ["ftjob-empty", "ftjob-other"]


def test_a_backup_is_a_working_database(settings: Settings, ledger: Ledger, tmp_path: Path) -> None:
    job = make_job(ledger)
    _, secret = ledger.create_api_key(name="x", scopes=["read"])
    target = tmp_path / "copy.db"
    backup(ledger, target)
    with pytest.raises(InvalidRequest, match="exists"):
        backup(ledger, target)
    make_job(ledger)
    copy = open_ledger(dataclasses.replace(settings, database_url=f"sqlite:///{target}"))
    assert [found.id for found in copy.list_jobs().data] == [job.id]
    assert copy.check_api_key(secret) is not None
    copy.close()


def test_the_command_an_operator_is_told_to_run_works(settings: Settings, tmp_path: Path) -> None:
    ledger = open_ledger(settings)
    job = make_job(ledger)
    ledger.close()
    environment = {**bare_environment(), **settings.to_env()}
    grpo = [sys.executable, "-m", "api.cli", "admin"]
    copy = subprocess.run([*grpo, "backup", str(tmp_path / "copy.db")], env=environment, capture_output=True, text=True, check=False)
    assert copy.returncode == 0, copy.stderr
    (settings.data_dir / "grpo.db").write_bytes(b"garbage" * 1000)
    refused = subprocess.run([*grpo, "rebuild"], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "move the file away" in refused.stderr
    for path in settings.data_dir.glob("grpo.db*"):
        path.unlink()
    done = subprocess.run([*grpo, "rebuild"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 jobs and 0 steps restored\n")
    ledger = open_ledger(settings)
    assert [found.id for found in ledger.list_jobs().data] == [job.id]
    ledger.close()


@pytest.mark.parametrize("harm", ["missing", "cut to nothing"])
def test_a_database_that_lost_every_job_is_not_served(settings: Settings, harm: str) -> None:
    """To SQLite it is a new one."""
    ledger = open_ledger(settings)
    refuse_emptied(ledger)
    job = make_job(ledger)
    start(ledger, job.id)
    refuse_emptied(ledger)
    ledger.close()
    for path in settings.data_dir.glob("grpo.db*"):
        path.unlink()
    if harm == "cut to nothing":
        (settings.data_dir / "grpo.db").write_bytes(b"")
    with pytest.raises(DatabaseDamaged, match=r"1 jobs were run in .*grpo admin rebuild"):
        Dispatcher.open(settings)
    with pytest.raises(DatabaseDamaged, match=r"1 jobs were run in .*grpo admin rebuild"):
        create_app(settings)
    ledger = open_ledger(settings)
    assert rebuild(ledger).jobs == [job.id]
    refuse_emptied(ledger)
    ledger.close()
