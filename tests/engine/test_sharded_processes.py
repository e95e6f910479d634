"""A job with divided weights as the engine starts it: a rank killed, paused, and resumed to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.runs import make_job, make_run, make_spec, outcome, start, text_of, weights_sha256
from tests.engine.test_rank_processes import DEADLINE_S, complete, crew, paused_after_a_step
from tests.stack import wait_for

pytestmark = pytest.mark.faults
STEPS = 8
PATIENCE_S = 60


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("sharded"))


def spec_of(job: Path, steps: int = STEPS) -> dict[str, Any]:
    resources = {"cpu_ranks": 2, "strategy": "fsdp", "rank_timeout_s": PATIENCE_S}
    return make_spec(job, limits={"num_steps": steps}, resources=resources)


def test_paused_and_resumed_to_the_same_bits(job: Path) -> None:
    undisturbed = complete(job, "undisturbed", spec_of(job))
    _, state = paused_after_a_step(job, spec_of(job))
    again = complete(job, "again", spec_of(job), epoch=2, resume_from=state)
    assert weights_sha256(again, STEPS) == weights_sha256(undisturbed, STEPS)


@pytest.mark.parametrize("rank", [1])
def test_a_killed_rank_ends_the_others_and_is_named(job: Path, rank: int) -> None:
    run_dir = make_run(job, f"killed-{rank}", spec_of(job, steps=100_000))
    process = start(run_dir)
    try:
        wait_for(lambda: "step.completed" in text_of(run_dir), "the first step", DEADLINE_S)
        crew(run_dir)[rank].kill()
        assert process.wait(timeout=DEADLINE_S) == 1
        assert not crew(run_dir)
        found = outcome(run_dir)
        assert (found.status, found.reason, found.retryable) == ("failed", "crash", True)
        assert f"rank {rank} of 2 was ended by SIGKILL" in found.message
    finally:
        for member in crew(run_dir).values():
            member.kill()
        process.kill()
        process.wait()
