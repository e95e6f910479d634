"""What the ledger promises, on SQLite and on PostgreSQL."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from grpo_engine.contract.error import (
    Conflict,
    IdempotencyMismatch,
    InsufficientStorage,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
)
from jobs import tables
from jobs.database import Database
from jobs.ledger import IdempotencyKey, Ledger, body_sha256, open_ledger
from jobs.ledger.creation import spec_json
from jobs.lifecycle import State, Wanted
from jobs.settings import Settings
from tests.jobs.makers import FakeAttempt, make_job, make_spec, make_upload


def key_for(body: Any, key: str = "k") -> IdempotencyKey:
    return IdempotencyKey("tester", key, body_sha256(body))


def states(ledger: Ledger, job_id: str) -> list[str]:
    return [event.type for event in ledger.events(job_id, limit=1000).data if event.type.startswith("job.")]


def start(ledger: Ledger, job_id: str) -> FakeAttempt:
    """Dispatch, claim and mark running."""
    job = ledger.get_job(job_id)
    dispatched = ledger.dispatch(job_id, from_epoch=job.epoch)
    assert dispatched is not None
    attempt = FakeAttempt(ledger.artifacts, job_id, dispatched.epoch)
    assert attempt.claim()
    assert ledger.mark_running(job_id, dispatched.epoch, "w1") is not None
    return attempt


# Creating


def test_an_accepted_job_is_in_the_database_and_in_its_directory(any_ledger: Ledger) -> None:
    job = make_job(any_ledger, metadata={"team": "a"}, suffix="x")
    again = any_ledger.get_job(job.id)
    assert again == job
    assert (job.state, job.status, job.phase, job.epoch, job.step) == (State.QUEUED, "queued", "queued", 0, 0)
    assert job.spec == make_spec(metadata={"team": "a"}, suffix="x")
    assert job.metadata == {"team": "a"}
    assert job.training_path == "inputs/training.jsonl"
    directory = any_ledger.artifacts.job_dir(job.id)
    assert any_ledger.artifacts.read_job_json(job.id)["id"] == job.id
    any_ledger.artifacts.file_content("file-a").unlink()
    assert (directory / "inputs" / "training.jsonl").read_text().startswith('{"prompt"'), "the job keeps its own link"


def test_the_same_key_and_body_is_the_same_job(any_ledger: Ledger) -> None:
    upload, spec = make_upload(any_ledger), make_spec()
    first = any_ledger.create_job(spec, training_path=upload, idempotency=key_for({"a": 1, "b": 2}))
    again = any_ledger.create_job(spec, training_path=upload, idempotency=key_for({"b": 2, "a": 1}))
    assert again.id == first.id
    with pytest.raises(IdempotencyMismatch, match=first.id):
        any_ledger.create_job(spec, training_path=upload, idempotency=key_for({"a": 2}))
    other = any_ledger.create_job(spec, training_path=upload, idempotency=key_for({"a": 2}, "other"))
    assert other.id != first.id
    assert sorted(any_ledger.artifacts.job_ids()) == sorted([first.id, other.id])


def test_fifty_posts_at_once_with_one_key_make_one_job(any_ledger: Ledger) -> None:
    upload, spec, gate = make_upload(any_ledger), make_spec(), threading.Barrier(50)

    def post(_: int) -> str:
        gate.wait(timeout=30)
        return any_ledger.create_job(spec, training_path=upload, idempotency=key_for("body")).id

    with ThreadPoolExecutor(50) as pool:
        ids = set(pool.map(post, range(50)))
    assert len(ids) == 1
    assert list(any_ledger.artifacts.job_ids()) == list(ids), "the losers' directories are gone"
    assert len(any_ledger.list_jobs(limit=100).data) == 1


def test_nothing_is_half_created(any_ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        any_ledger.create_job(make_spec(), training_path=tmp_path / "absent")
    assert caught.value.param == "training_file"
    assert list(any_ledger.artifacts.jobs_dir.iterdir()) == []
    assert any_ledger.list_jobs().data == []


def test_a_full_disk_refuses_the_job_and_leaves_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = make_upload(ledger)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ledger.artifacts, "write_job_json", full)
    with pytest.raises(InsufficientStorage):
        ledger.create_job(make_spec(), training_path=upload)
    assert list(ledger.artifacts.jobs_dir.iterdir()) == []


# Listing


def test_pages_are_stable_while_jobs_arrive(any_ledger: Ledger) -> None:
    made = [make_job(any_ledger).id for _ in range(7)]
    first = any_ledger.list_jobs(limit=3)
    assert [job.id for job in first.data] == made[:-4:-1]
    assert first.has_more
    make_job(any_ledger)
    second = any_ledger.list_jobs(limit=10, after=first.data[-1].id)
    assert [job.id for job in second.data] == made[3::-1]
    assert not second.has_more
    assert [job.id for job in any_ledger.list_jobs(order="asc", limit=2).data] == made[:2]
    with pytest.raises(InvalidRequest) as caught:
        any_ledger.list_jobs(after="ftjob-none")
    assert caught.value.param == "after"


def test_jobs_of_one_moment_are_still_in_one_order(any_ledger: Ledger) -> None:
    any_ledger.clock = lambda: 5.0
    made = sorted(make_job(any_ledger).id for _ in range(5))
    seen: list[str] = []
    while len(seen) < 5:
        seen += [job.id for job in any_ledger.list_jobs(order="asc", limit=2, after=seen[-1] if seen else None).data]
    assert seen == made


def test_filters(any_ledger: Ledger) -> None:
    times = iter([10.0] * 2 + [20.0] * 2 + [30.0] * 9)
    any_ledger.clock = lambda: next(times)
    red, blue = make_job(any_ledger, metadata={"c": "red", "n": "1"}).id, make_job(any_ledger, metadata={"c": "blue"}).id
    other = any_ledger.create_job(make_spec(), training_path=make_upload(any_ledger), project="p2").id
    any_ledger.request(blue, "cancel")
    assert [job.id for job in any_ledger.list_jobs(metadata={"c": "red"}).data] == [red]
    assert any_ledger.list_jobs(metadata={"c": "red", "n": "2"}).data == []
    assert [job.id for job in any_ledger.list_jobs(states=[State.CANCELLED]).data] == [blue]
    assert [job.id for job in any_ledger.list_jobs(created_after=10.0).data] == [other, blue]
    assert [job.id for job in any_ledger.list_jobs(project="p2").data] == [other]
    assert any_ledger.count_by_state()[State.QUEUED] == 2
    assert any_ledger.queue_ahead(any_ledger.get_job(other)) == 1


def test_an_unknown_job_is_not_found(any_ledger: Ledger) -> None:
    for call in (any_ledger.get_job, any_ledger.events, any_ledger.metrics, any_ledger.checkpoints, any_ledger.commands):
        with pytest.raises(NotFound):
            call("ftjob-none")
    with pytest.raises(NotFound):
        any_ledger.request("ftjob-none", "cancel")


# Requests


def test_cancel_before_a_worker_has_it_is_immediate_and_final(any_ledger: Ledger) -> None:
    for steps in (0, 1):
        job = make_job(any_ledger)
        if steps:
            assert any_ledger.dispatch(job.id, from_epoch=0) is not None
        for _ in range(2):
            assert any_ledger.request(job.id, "cancel").state is State.CANCELLED
        for wanted in ("pause", "resume"):
            with pytest.raises(Conflict) as caught:
                any_ledger.request(job.id, wanted)
            assert caught.value.headers["x-should-retry"] == "false"
        if steps:
            assert not any_ledger.artifacts.claim(job.id, 1, "late worker"), "no worker can start it any more"
        assert states(any_ledger, job.id).count("job.cancelled") == 1


def test_cancel_of_a_claimed_job_waits_for_its_end(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    for _ in range(2):
        asked = any_ledger.request(job.id, "cancel")
        assert (asked.state, asked.wanted, asked.status, asked.phase) == (State.STOPPING, Wanted.CANCEL, "running", "cancelling")
    with pytest.raises(Conflict):
        any_ledger.request(job.id, "pause")
    attempt.end("stopped", "cancel")
    outcome = any_ledger.artifacts.outcome(job.id, 1)
    assert outcome is not None
    settled = any_ledger.settle(job.id, 1, outcome)
    assert settled is not None
    assert settled.state is State.CANCELLED
    assert settled.finished_at is not None
    assert any_ledger.settle(job.id, 1, outcome) is None, "terminal states are written once"
    assert states(any_ledger, job.id) == ["job.created", "job.dispatched", "job.running", "job.stopping", "job.cancelled"]


def test_a_claim_that_races_with_cancel_has_one_winner(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    any_ledger.dispatch(job.id, from_epoch=0)
    assert any_ledger.artifacts.claim(job.id, 1, "w1"), "the worker was first"
    assert any_ledger.request(job.id, "cancel").state is State.STOPPING


def test_pause_and_resume(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    assert any_ledger.request(job.id, "pause").state is State.PAUSED
    assert any_ledger.request(job.id, "pause").status == "paused"
    assert any_ledger.request(job.id, "resume").state is State.QUEUED
    assert any_ledger.request(job.id, "resume").state is State.QUEUED
    attempt = start(any_ledger, job.id)
    assert any_ledger.request(job.id, "pause").phase == "pausing"
    attempt.end("stopped", "pause", retryable=True, last_step=3)
    outcome = any_ledger.artifacts.outcome(job.id, 1)
    assert outcome is not None
    settled = any_ledger.settle(job.id, 1, outcome)
    assert settled is not None
    assert settled.state is State.PAUSED
    assert any_ledger.request(job.id, "resume").wanted is Wanted.RUN
    start(any_ledger, job.id)
    any_ledger.request(job.id, "pause")
    assert any_ledger.request(job.id, "resume").wanted is Wanted.REQUEUE, "resume while pausing continues in a new attempt"
    settled = any_ledger.settle(job.id, 2, outcome)
    assert settled is not None
    assert (settled.state, settled.preemptions) == (State.QUEUED, 0)
    any_ledger.request(job.id, "pause")
    assert any_ledger.request(job.id, "cancel").state is State.CANCELLED


def test_commands_are_numbered_and_answered(any_ledger: Ledger) -> None:
    job = make_job(any_ledger)
    attempt = start(any_ledger, job.id)
    first = any_ledger.add_command(job.id, kind="set", beta=0.1, actor="ann", if_version=1)
    with pytest.raises(PreconditionFailed):
        any_ledger.add_command(job.id, kind="set", beta=0.2, if_version=1)
    second = any_ledger.add_command(job.id, kind="checkpoint", if_version=2)
    assert (first.number, second.number, first.status) == (1, 2, "pending")
    assert any_ledger.pending_commands() == {job.id: [first, second]}
    answered = [
        attempt.event("control.applied", 4, command=1, effective_step=4, old={"beta": 0.04}, new={"beta": 0.1}, actor="ann"),
        attempt.event("control.refused", 4, command=2, reason="no"),
    ]
    any_ledger.ingest(job.id, answered)
    applied, refused = any_ledger.commands(job.id)
    assert (applied.status, applied.effective_step, applied.answer["new"]) == ("applied", 4, {"beta": 0.1})
    assert refused.status == "refused"
    assert any_ledger.pending_commands() == {}
    any_ledger.request(job.id, "cancel")
    with pytest.raises(Conflict):
        any_ledger.add_command(job.id, kind="checkpoint")


# Files, keys, facts


def test_files(any_ledger: Ledger) -> None:
    make_upload(any_ledger)
    record = any_ledger.add_file("file-a", filename="näme.jsonl", purpose="fine-tune", num_bytes=3, sha256="0" * 64, rows=1)
    assert any_ledger.get_file("file-a") == record
    any_ledger.clock = lambda: 9e9
    any_ledger.add_file("file-b", filename="b", purpose="other", num_bytes=3, sha256="0" * 64)
    assert [file.id for file in any_ledger.list_files().data] == ["file-b", "file-a"]
    assert [file.id for file in any_ledger.list_files(after="file-b", purpose="fine-tune").data] == ["file-a"]
    any_ledger.delete_file("file-a")
    assert not any_ledger.artifacts.file_dir("file-a").exists()
    with pytest.raises(NotFound):
        any_ledger.delete_file("file-a")


def test_api_keys_open_what_they_should_and_no_longer(any_ledger: Ledger) -> None:
    now = [1000.0]
    any_ledger.clock = lambda: now[0]
    record, secret = any_ledger.create_api_key(name="ci", scopes=["submit", "read"], expires_at=2000.0)
    assert secret.startswith(f"grpo_{record.id}_")
    found = any_ledger.check_api_key(secret)
    assert found is not None
    assert (found.id, found.scopes) == (record.id, ("read", "submit"))
    assert any_ledger.get_api_key(record.id).last_used_at == 1000.0
    for wrong in (secret + "x", secret[:-1], "grpo_zz_x", "", "x" * 5000, "grpo_é_x", f"grpo_{record.id}_"):
        assert any_ledger.check_api_key(wrong) is None
    now[0] = 2000.0
    assert any_ledger.check_api_key(secret) is None, "expired"
    other, secret = any_ledger.create_api_key(name="x", scopes=["admin"])
    any_ledger.revoke_api_key(other.id)
    assert any_ledger.check_api_key(secret) is None, "revoked"
    with any_ledger.database.read() as connection:
        assert secret not in str(connection.execute(sa.select(tables.api_keys)).all())
    with pytest.raises(InvalidRequest):
        any_ledger.create_api_key(name="x", scopes=["root"])


def test_facts(any_ledger: Ledger) -> None:
    assert any_ledger.get_fact("a") is None
    any_ledger.set_fact("a", "1")
    any_ledger.set_fact("a", "2")
    assert any_ledger.get_fact("a") == "2"


# Schema


def test_the_migrations_build_the_tables(any_ledger: Ledger) -> None:
    any_ledger.database.migrate()
    with any_ledger.database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), tables.metadata) == []


def test_many_processes_may_migrate_at_once(settings: Settings) -> None:
    with ThreadPoolExecutor(8) as pool:
        for book in list(pool.map(lambda _: open_ledger(settings), range(8))):
            assert book.list_jobs().data == []
            book.close()


def test_a_newer_schema_is_refused(ledger: Ledger) -> None:
    with ledger.database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(RuntimeError, match="newer version"):
        ledger.database.migrate()


def test_the_spec_survives_as_canonical_json() -> None:
    spec = make_spec(metadata={"b": "2", "a": "é\U0001f600"})
    assert spec_json(spec) == spec_json(type(spec).model_validate_json(spec_json(spec)))
    assert '"a":"é\U0001f600"' in spec_json(spec)


def test_the_database_is_durable_and_readers_do_not_wait(ledger: Ledger, settings: Settings) -> None:
    job = make_job(ledger)
    with ledger.database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    blocked = Database.open(dataclasses.replace(settings, database_timeout_s=0.2))
    with ledger.database.write():
        assert ledger.get_job(job.id).id == job.id
        with pytest.raises(Exception, match="busy") as caught, blocked.write():
            pass
    assert caught.value.status == 503  # type: ignore[attr-defined]
    blocked.close()


def test_a_damaged_database_is_refused_with_the_remedy(settings: Settings) -> None:
    book = open_ledger(settings)
    for _ in range(20):
        make_job(book)
    book.close()
    path = settings.data_dir / "grpo.db"
    content = bytearray(path.read_bytes())
    content[4096 : len(content)] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match="grpo admin rebuild"):
        open_ledger(settings)
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(RuntimeError, match="grpo admin rebuild"):
        open_ledger(settings)
