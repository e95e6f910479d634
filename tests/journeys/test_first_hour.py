"""docs/first-hour.md is typed as it stands, into one shell, against the whole server; only the model is the tiny one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import ROOT, environment
from tests.stack import LiveStack

pytestmark = pytest.mark.slow

TEXT = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
ELSEWHERE = ("make demo", "grpo up")
"""What CI runs by itself, and what the server of this test stands for."""


def blocks() -> list[str]:
    """The commands of the document, in order."""
    found = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [block for block in found if not any(words in block for words in ELSEWHERE)]


def test_the_first_hour_can_be_lived_as_it_is_written(server: LiveStack, tmp_path: Path) -> None:
    """The parent has more steps here, so that it still runs when it is steered; the tiny model needs no time for one."""
    script = "\n".join(["set -eux", *blocks()])
    for written, here in (('"smollm2-135m-instruct"', '"tiny"'), ('"limits": {"num_steps": 12}', '"limits": {"num_steps": 120}')):
        assert script.count(written) == 1
        script = script.replace(written, here)
    script = script.replace('"keep": 3', '"keep": 100')
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "grpo"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m api.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment(GRPO_BASE_URL=server.url, PATH=path),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert "reward 0.7083  right 1  short 0.5833" in done.stdout
    assert "is promoted and pinned; it passed max_ref_kl 0.5" in done.stdout
    jobs = server.client.jobs().data
    fork, parent = (next(job for job in jobs if job.user_provided_suffix == name) for name in ("capitals-again", "capitals"))
    assert (fork.status, parent.status) == ("succeeded", "succeeded")
    assert fork.lineage.parent_job == parent.id
    assert [command.status for command in server.client.control(parent.id).commands] == ["applied"]
    assert (tmp_path / "capitals-model" / "model.safetensors").is_file()
