"""A SIGKILL before every single file operation of writing a checkpoint: the old state or the new one is there, never none."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_engine import checkpoint
from grpo_engine.checkpoint import ResumeState
from grpo_engine.outcome import CheckpointDamaged

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.unlink", "shutil.rmtree", "fsync"}


def resume_state(step: int) -> ResumeState:
    return ResumeState(step, {"w": torch.full((4, 4), float(step))}, {"m": torch.zeros(4)}, {"cursor": step})


def save(parent: Path, step: int) -> None:
    checkpoint.save(
        parent, "resume", step, lambda path: checkpoint.write_resume(path, resume_state(step)), epoch=1, job_id="ftjob-x", about={}
    )


def renew(parent: Path) -> None:
    """What the keeper does at step 4: write the new state, then delete the old one."""
    checkpoint.remove_partial(parent)
    save(parent, 4)
    shutil.rmtree(parent / "resume-000002")


def renew_and_die(parent: Path, at: int) -> bool:
    """In a forked child, die by SIGKILL before the given file operation; False when there are fewer."""
    pid = os.fork()
    if pid == 0:
        left = at

        def strike(event: str, _arguments: Any = ()) -> None:
            nonlocal left
            if event in OPERATIONS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        real_fsync = os.fsync

        def fsync(descriptor: int) -> None:
            strike("fsync")
            real_fsync(descriptor)

        code = 1
        try:
            os.fsync = fsync
            sys.addaudithook(strike)
            renew(parent)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def whole(parent: Path) -> dict[str, int]:
    """The states that verify, by name."""
    found = {}
    for path in sorted(parent.glob("resume-*")):
        try:
            manifest, resume = checkpoint.read_resume(path)
        except CheckpointDamaged:
            continue
        assert manifest.step == resume.step == int(resume.weights["w"][0, 0]) == resume.state["cursor"]
        found[path.name] = resume.step
    return found


def test_a_kill_before_any_file_operation_leaves_a_whole_state(tmp_path: Path) -> None:
    seen: set[tuple[str, ...]] = set()
    number = 0
    while True:
        parent = tmp_path / str(number)
        save(parent, 2)
        was_killed = renew_and_die(parent, number)
        names = tuple(whole(parent))
        assert names, f"killed before operation {number}: no state is left"
        seen.add(names)
        checkpoint.remove_partial(parent)
        assert [path.name for path in parent.iterdir() if path.name.startswith(".")] == []
        save(parent, 6)
        assert "resume-000006" in whole(parent), "the next write is not in the way of what was left"
        shutil.rmtree(parent)
        if not was_killed:
            break
        number += 1
    assert number >= 10, "too few file operations were seen for this to prove anything"
    assert seen == {("resume-000002",), ("resume-000002", "resume-000004"), ("resume-000004",)}
