"""A file-size limit in place of a full disk: checkpoints are refused, training goes on to the last step, nothing partial is left."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series

pytestmark = pytest.mark.faults


def test_files_beyond_the_limit_cost_checkpoints_and_no_step(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_dir = make_run(job, spec=make_spec(job, checkpoints={"every": 2, "resume_every": 2}))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with (run_dir / "engine.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "grpo_engine", str(run_dir)], stdout=log, stderr=log, preexec_fn=limit, timeout=120, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert sorted(series(run_dir)) == [1, 2, 3, 4, 5, 6]
    failed = events(run_dir, "checkpoint.failed")
    assert {event.data["kind"] for event in failed} == {"published", "resume"}
    assert list((run_dir / "checkpoints").iterdir()) == [], "nothing partial is left"
    assert (outcome(run_dir).status, outcome(run_dir).reason) == ("failed", "checkpoint_failed")
