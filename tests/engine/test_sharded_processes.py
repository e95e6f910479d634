"""A job with divided weights as the engine starts it: killed, paused, resumed by as many ranks, by fewer, and under the other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_engine.contract.event import EXIT_STOPPED
from tests.engine.runs import make_job, make_run, make_spec, outcome, series, start, text_of, weights_sha256
from tests.engine.test_rank_processes import DEADLINE_S, complete, crew, published, send
from tests.stack import wait_for

pytestmark = pytest.mark.faults
STEPS = 8
PATIENCE_S = 60


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("sharded"))


def spec_of(job: Path, ranks: int = 2, steps: int = STEPS, strategy: str = "fsdp") -> dict[str, Any]:
    resources = {"cpu_ranks": ranks, "strategy": strategy, "rank_timeout_s": PATIENCE_S if ranks > 1 else 1800}
    return make_spec(job, limits={"num_steps": steps}, resources=resources)


def test_paused_and_resumed_to_the_same_bits_and_by_others_to_the_same_numbers(job: Path) -> None:
    """What lies on the disk is whole: it does not say how many ranks wrote it."""
    undisturbed = complete(job, "undisturbed", spec_of(job))
    run_dir = make_run(job, "paused", spec_of(job))
    process = start(run_dir)
    wait_for(lambda: "step.completed" in text_of(run_dir), "the first step", DEADLINE_S)
    send(run_dir, "pause")
    assert process.wait(timeout=DEADLINE_S) == EXIT_STOPPED, (run_dir / "engine.log").read_text()
    assert not crew(run_dir)
    found = outcome(run_dir)
    assert (found.status, found.reason) == ("stopped", "pause")
    assert 0 < found.last_step < STEPS
    state = str(run_dir / "checkpoints" / str(found.resume_checkpoint))
    again = complete(job, "again", spec_of(job), epoch=2, resume_from=state)
    assert weights_sha256(again, STEPS) == weights_sha256(undisturbed, STEPS)
    for name, spec in (("alone", spec_of(job, 1, strategy="ddp")), ("whole", spec_of(job, 2, strategy="ddp"))):
        other = complete(job, name, spec, epoch=2, resume_from=state)
        assert sorted(series(other)) == list(range(found.last_step + 1, STEPS + 1))
        weights = published(other, STEPS)
        for weight, value in published(undisturbed, STEPS).items():
            torch.testing.assert_close(weights[weight], value, rtol=1e-2, atol=1e-4)
    back = complete(job, "back", spec_of(job), epoch=2, resume_from=str(_first_resume(complete(job, "ddp", spec_of(job, 1, 4, "ddp")))))
    assert sorted(series(back)) == list(range(5, STEPS + 1))


def _first_resume(run_dir: Path) -> Path:
    return next((run_dir / "checkpoints").glob("resume-*"))


@pytest.mark.parametrize("rank", [0, 1])
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
