"""A checkpoint directory is complete or absent, and damage is noticed before use."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from grpo_engine.checkpoint import Manifest, ResumeState, read_resume, remove_partial, save, verify, write_resume
from grpo_engine.outcome import CheckpointDamaged


def resume_state(step: int = 4) -> ResumeState:
    weights = {"w": torch.randn(3, 5), "v.t": torch.randn(5, 3).T}
    optimizer = {"w|exp_avg": torch.randn(3, 5), "w|step": torch.tensor(4.0)}
    return ResumeState(step, weights, optimizer, {"beta": {"value": 0.1 + 0.2}, "cursor": {"epoch": 1, "position": 2}})


def save_resume(parent: Path, resume: ResumeState) -> Manifest:
    return save(
        parent, "resume", resume.step, lambda path: write_resume(path, resume), epoch=1, job_id="j", about={"reference_sha256": "abc"}
    )


def test_what_is_saved_is_read_back_exactly(tmp_path: Path) -> None:
    resume = resume_state()
    saved = save_resume(tmp_path, resume)
    manifest, loaded = read_resume(tmp_path / "resume-000004")
    assert manifest == saved
    assert manifest.about == {"reference_sha256": "abc"}
    assert loaded.state == resume.state
    assert loaded.step == 4
    for name, tensor in {**resume.weights, **resume.optimizer}.items():
        assert torch.equal(tensor, {**loaded.weights, **loaded.optimizer}[name])


def test_the_directory_appears_only_when_complete(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def write(path: Path) -> None:
        (path / "a").write_text("a")
        seen.append([child.name for child in tmp_path.iterdir()])

    save(tmp_path, "published", 1, write, epoch=1, job_id="j", about={})
    assert len(seen[0]) == 1
    assert seen[0][0].startswith(".tmp-")
    assert [child.name for child in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_nothing_and_keeps_the_older_one(tmp_path: Path, error: BaseException) -> None:
    save_resume(tmp_path, resume_state(2))

    def write(path: Path) -> None:
        (path / "half").write_text("half")
        raise error

    with pytest.raises(type(error)):
        save(tmp_path, "resume", 3, write, epoch=1, job_id="j", about={})
    assert [child.name for child in tmp_path.iterdir()] == ["resume-000002"]
    verify(tmp_path / "resume-000002")


def test_too_little_room_is_known_before_writing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="are free") as caught:
        save(tmp_path, "published", 1, lambda path: None, epoch=1, job_id="j", about={}, expected_bytes=2**62)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_of_a_killed_write_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-resume-000002-abcd").mkdir()
    (tmp_path / ".tmp-resume-000002-abcd" / "weights.safetensors").write_text("x")
    remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == []


def damage_bit(directory: Path) -> None:
    path = directory / "weights.safetensors"
    block = bytearray(path.read_bytes())
    block[-1] ^= 1
    path.write_bytes(block)


def damage_length(directory: Path) -> None:
    path = directory / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_missing(directory: Path) -> None:
    (directory / "state.json").unlink()


def damage_extra(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_text("pickle")


def damage_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("{")


def damage_format(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def damage_path(directory: Path) -> None:
    path = directory / "manifest.json"
    raw = json.loads(path.read_text())
    raw["files"].append({"name": "../resume-000004/state.json", "bytes": 1, "sha256": "0"})
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("damage", [damage_bit, damage_length, damage_missing, damage_extra, damage_manifest, damage_format, damage_path])
def test_damage_is_refused(tmp_path: Path, damage: object) -> None:
    save_resume(tmp_path, resume_state())
    assert callable(damage)
    damage(tmp_path / "resume-000004")
    with pytest.raises(CheckpointDamaged):
        read_resume(tmp_path / "resume-000004")


def test_published_weights_are_no_resume_state(tmp_path: Path) -> None:
    save(tmp_path, "published", 1, lambda path: None, epoch=1, job_id="j", about={})
    with pytest.raises(CheckpointDamaged, match="not a resume state"):
        read_resume(tmp_path / "step-000001")
