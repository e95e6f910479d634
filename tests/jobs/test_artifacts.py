"""Paths that cannot be escaped, files that survive, claims with one winner."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_engine.contract.error import NotFound
from grpo_engine.contract.event import Outcome
from jobs.artifacts import Artifacts, write_atomic
from jobs.event_files import read_lines

JOB = "ftjob-a"


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    artifacts = Artifacts(tmp_path / "data")
    artifacts.prepare()
    return artifacts


WRONG_IDS = [
    "", ".", "..", "../x", "ftjob-..", "ftjob-a/../b", "/etc", "ftjob-a\0", "ftjob-a\n", "file-a", "ftjob-%2e%2e",
    "ftjob-" + "a" * 65, "ftjob-ä",
]  # fmt: skip


@pytest.mark.parametrize("name", WRONG_IDS)
def test_ids_of_the_wrong_shape_lead_nowhere(artifacts: Artifacts, name: str) -> None:
    with pytest.raises(NotFound):
        artifacts.job_dir(name)


@pytest.mark.parametrize(
    "name", ["..", "step-1", "step-000001/..", "step-0000010000000", ".tmp-step-000001", "resume-00000x", "step-000001\n"]
)
def test_checkpoint_names_of_the_wrong_shape_lead_nowhere(artifacts: Artifacts, name: str) -> None:
    with pytest.raises(NotFound):
        artifacts.checkpoint_dir(JOB, 1, name)


@pytest.mark.parametrize(
    "member", ["..", "../manifest.json", ".hidden", "a/b/c", "a/../b", "a/.b", "./b", "a//b", "a/", "", "a\0b", "/etc/passwd"]
)
def test_member_names_of_the_wrong_shape_lead_nowhere(artifacts: Artifacts, member: str) -> None:
    with pytest.raises(NotFound):
        artifacts.checkpoint_file(JOB, 1, "step-000001", member)


def test_a_planted_link_leads_nowhere(artifacts: Artifacts, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text("{}")
    checkpoints = artifacts.attempt_dir(JOB, 1) / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-000001").symlink_to(secret)
    with pytest.raises(NotFound):
        artifacts.checkpoint_dir(JOB, 1, "step-000001")
    (checkpoints / "step-000002").mkdir()
    (checkpoints / "step-000002" / "config.json").symlink_to(secret / "config.json")
    with pytest.raises(NotFound):
        artifacts.checkpoint_file(JOB, 1, "step-000002", "config.json")
    (checkpoints / "step-000002" / "adapter").symlink_to(secret)
    with pytest.raises(NotFound):
        artifacts.checkpoint_file(JOB, 1, "step-000002", "adapter/config.json")
    (artifacts.jobs_dir / "ftjob-link").symlink_to(secret)
    with pytest.raises(NotFound):
        artifacts.job_dir("ftjob-link")


def test_a_data_directory_behind_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    artifacts = Artifacts(tmp_path / "link")
    artifacts.prepare()
    artifacts.write_job_json(JOB, {"id": JOB})
    assert artifacts.read_job_json(JOB) == {"id": JOB}
    assert list(artifacts.job_ids()) == [JOB]
    assert artifacts.free_bytes() > 0


def test_of_many_claims_at_once_one_wins(artifacts: Artifacts) -> None:
    gate = threading.Barrier(16)

    def claim(number: int) -> bool:
        gate.wait(timeout=30)
        return artifacts.claim(JOB, 1, f"w{number}")

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(claim, range(16)))
    assert won.count(True) == 1
    holder = artifacts.claim_holder(JOB, 1)
    assert holder is not None
    assert holder["worker_id"] == f"w{won.index(True)}"
    assert sorted(os.listdir(artifacts.attempt_dir(JOB, 1))) == ["claim.json"]
    assert artifacts.claim_holder(JOB, 2) is None


def test_the_first_verdict_stands_and_a_damaged_one_is_a_crash(artifacts: Artifacts) -> None:
    first = Outcome(status="succeeded", reason="completed", message="m", retryable=False, last_step=3)
    artifacts.attempt_dir(JOB, 1).mkdir(parents=True)
    assert artifacts.outcome(JOB, 1) is None
    assert artifacts.write_outcome(JOB, 1, first)
    assert not artifacts.write_outcome(JOB, 1, first.model_copy(update={"status": "failed"}))
    assert artifacts.outcome(JOB, 1) == first
    (artifacts.attempt_dir(JOB, 1) / "outcome.json").write_text("{")
    damaged = artifacts.outcome(JOB, 1)
    assert damaged is not None
    assert (damaged.status, damaged.reason, damaged.retryable) == ("failed", "crash", True)


def test_an_input_is_a_link_and_across_file_systems_a_copy(artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = tmp_path / "content"
    upload.write_text("a\n")
    linked = artifacts.link_input(upload, JOB, "training")
    assert linked.samefile(upload)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied = artifacts.link_input(upload, "ftjob-b", "training")
    assert not copied.samefile(upload)
    assert copied.read_text() == "a\n"


def test_lines_longer_than_the_block_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 100 + b"\ny\nz")
    lines, offset = read_lines(path, 0, limit_bytes=10)
    assert lines[0] == b"x" * 100
    rest, offset = read_lines(path, offset, limit_bytes=10) if offset == 101 else ([], offset)
    assert offset == 103
    assert (lines + rest)[1] == b"y"
    assert read_lines(path, offset) == ([], offset)
    assert read_lines(tmp_path / "absent", 7) == ([], 7)


def test_a_failed_replacement_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.json"
    write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["job.json"]
