"""Several processes for one job, as the engine starts them: the numbers of one process, one voice, and nobody left behind."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_engine.__main__ import run
from grpo_engine.contract.command import Command
from grpo_engine.contract.event import EXIT_CONFIG, EXIT_STOPPED, EXIT_SUCCEEDED, Outcome
from grpo_engine.rank_processes import LOST, Seat, leave_verdict, verdict, verdict_path
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, start, text_of, train, weights_sha256
from tests.stack import wait_for

STEPS = 3
ENDLESS = 100_000
DEADLINE_S = 180
PATIENCE_S = 15
"""Long enough for a loaded machine to hold up one rank without the other giving up."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("ranks"))


def spec_of(job: Path, ranks: int, steps: int = STEPS, **resources: Any) -> dict[str, Any]:
    resources |= {"cpu_ranks": ranks}
    return make_spec(job, limits={"num_steps": steps}, resources=resources)


def complete(job: Path, name: str, spec: dict[str, Any], **dispatch: Any) -> Path:
    """An attempt in processes of its own, to its end."""
    run_dir = make_run(job, name, spec, **dispatch)
    process = start(run_dir)
    status = process.wait(timeout=DEADLINE_S)
    assert status == EXIT_SUCCEEDED, (run_dir / "engine.log").read_text()
    assert not crew(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def alone(job: Path) -> Path:
    return train(job, "alone", spec_of(job, 1))


@pytest.fixture(scope="module")
def pair(job: Path) -> Path:
    return complete(job, "pair", spec_of(job, 2))


def crew(run_dir: Path) -> dict[int | None, psutil.Process]:
    """Living processes of an attempt by rank; None is the one that started them. A zombie does not live."""
    found: dict[int | None, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_dead = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if str(run_dir) in words and not is_dead:
            found[int(words[words.index("--rank") + 1]) if "--rank" in words else None] = process
    return found


def published(run_dir: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def test_two_processes_give_the_series_and_weights_of_one(alone: Path, pair: Path) -> None:
    """fp32 sums are taken in another order, and Adam divides by small numbers: equal to about 1e-4, not to the bit."""
    one, two = series(alone), series(pair)
    assert one.keys() == two.keys() == set(range(1, STEPS + 1))
    for step, metrics in one.items():
        assert metrics.keys() == two[step].keys()
        for name, value in metrics.items():
            assert math.isclose(two[step][name], value, rel_tol=1e-3, abs_tol=1e-5), (step, name, value, two[step][name])
    weights = published(pair)
    for name, weight in published(alone).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-5)


def test_one_voice_and_a_checkpoint_that_loads(pair: Path) -> None:
    told = events(pair)
    assert [event.type for event in told].count("engine.started") == [event.type for event in told].count("run.finished") == 1
    assert told[0].data["ranks"] == 2
    assert (outcome(pair).status, outcome(pair).last_step) == ("succeeded", STEPS)
    assert not list(pair.glob("rank-*.json"))
    model = AutoModelForCausalLM.from_pretrained(pair / "checkpoints" / f"step-{STEPS:06d}")
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_more_gpus_than_there_are_is_a_config_error_of_every_rank(job: Path) -> None:
    """Said before the ranks wait for each other."""
    too_many = torch.cuda.device_count() + 2
    run_dir = make_run(job, "gpus", make_spec(job, resources={"device": "auto", "gpus": too_many}))
    for rank in (1, 0):
        assert run(run_dir, Seat(rank, too_many, str(run_dir / "meet"))) == EXIT_CONFIG
    for found in (outcome(run_dir), Outcome.model_validate_json(verdict_path(run_dir, 1).read_bytes())):
        assert (found.status, found.reason, found.param) == ("failed", "config_error", "method.grpo.resources.gpus")
        assert f"{too_many} GPUs were asked for and torch sees {too_many - 2}" in found.message


def left(reason: str, message: str) -> Outcome:
    return Outcome(status="failed", reason=reason, message=message, retryable=True, last_step=0, resume_checkpoint=None)


@pytest.mark.parametrize(
    ("ended", "said", "reason", "words"),
    [
        ({1: 1, 0: 1}, {0: LOST, 1: "out_of_memory"}, "out_of_memory", "rank 1 of 2: out_of_memory"),
        ({0: 1, 1: -9}, {0: LOST}, "crash", "rank 1 of 2 was ended by SIGKILL"),
        ({0: 1, 1: 3}, {0: LOST}, "crash", "rank 1 of 2 exited with status 3"),
        ({0: 1}, {0: LOST}, LOST, "rank 1 of 2 did not answer"),
        ({0: 1, 1: 1}, {0: LOST, 1: LOST}, LOST, "did not hear each other"),
    ],
)
def test_the_verdict_names_the_rank_that_failed_by_itself(
    tmp_path: Path, ended: dict[int, int], said: dict[int, str], reason: str, words: str
) -> None:
    for rank, why in said.items():
        leave_verdict(tmp_path, rank, left(why, why))
    found = verdict(tmp_path, 2, ended)
    assert found.reason == reason
    assert words in found.message


def send(run_dir: Path, kind: str) -> None:
    command = Command.model_validate_json(json.dumps({"number": 1, "type": kind, "actor": "person"}))
    (run_dir / "commands.jsonl").write_text(command.model_dump_json() + "\n")


def paused_after_a_step(job: Path, spec: dict[str, Any]) -> tuple[Outcome, str]:
    """An attempt paused between its first step and its last: its outcome, and the state to resume from."""
    run_dir = make_run(job, "paused", spec)
    process = start(run_dir)
    wait_for(lambda: "step.completed" in text_of(run_dir), "the first step", DEADLINE_S)
    send(run_dir, "pause")
    assert process.wait(timeout=DEADLINE_S) == EXIT_STOPPED, (run_dir / "engine.log").read_text()
    assert not crew(run_dir)
    found = outcome(run_dir)
    assert (found.status, found.reason) == ("stopped", "pause")
    assert 0 < found.last_step < spec["method"]["grpo"]["limits"]["num_steps"]
    assert found.resume_checkpoint == f"resume-{found.last_step:06d}"
    return found, str(run_dir / "checkpoints" / found.resume_checkpoint)


@pytest.mark.faults
def test_paused_together_and_resumed_by_two_or_by_one(job: Path) -> None:
    long = 12
    undisturbed = complete(job, "long", spec_of(job, 2, long))
    found, state = paused_after_a_step(job, spec_of(job, 2, long))
    two = complete(job, "resumed-2", spec_of(job, 2, long), epoch=2, resume_from=state)
    assert weights_sha256(two, long) == weights_sha256(undisturbed, long)
    one = complete(job, "resumed-1", spec_of(job, 1, long), epoch=2, resume_from=state)
    assert sorted(series(one)) == list(range(found.last_step + 1, long + 1))
    weights = published(one, long)
    for name, weight in published(undisturbed, long).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=1e-4)


@pytest.fixture
def running(job: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, subprocess.Popen[bytes], dict[int | None, psutil.Process]]]:
    """A job of two ranks that has done a step; nothing of it is left afterwards, whatever the test does."""
    run_dir = make_run(job, request.node.name, spec_of(job, 2, ENDLESS, rank_timeout_s=PATIENCE_S))
    process = start(run_dir)
    try:
        wait_for(lambda: "step.completed" in text_of(run_dir), "the first step", DEADLINE_S)
        members = crew(run_dir)
        assert members.keys() == {None, 0, 1}
        yield run_dir, process, members
    finally:
        for member in crew(run_dir).values():
            member.kill()
        process.kill()
        process.wait()


Running = tuple[Path, subprocess.Popen[bytes], dict[int | None, psutil.Process]]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_parent_ends_no_rank_is_left(running: Running, number: signal.Signals) -> None:
    run_dir, process, _ = running
    process.send_signal(number)
    assert process.wait(timeout=DEADLINE_S) == -number
    wait_for(lambda: not crew(run_dir), "the ranks to be gone", 10)
    assert not (run_dir / "outcome.json").exists(), "a cancel is the supervisor's to judge"


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(running: Running, rank: int) -> None:
    run_dir, process, members = running
    members[rank].kill()
    assert process.wait(timeout=DEADLINE_S) == 1
    assert not crew(run_dir)
    found = outcome(run_dir)
    assert (found.status, found.reason, found.retryable) == ("failed", "crash", True)
    assert f"rank {rank} of 2 was ended by SIGKILL" in found.message
    assert found.last_step >= 1


@pytest.mark.faults
@pytest.mark.parametrize("rank", [1])
def test_a_rank_that_is_silent_ends_the_job_after_its_timeout(running: Running, rank: int) -> None:
    run_dir, process, members = running
    members[rank].suspend()
    assert process.wait(timeout=DEADLINE_S) == 1
    assert not crew(run_dir)
    found = outcome(run_dir)
    assert (found.status, found.reason, found.retryable) == ("failed", LOST, True)
    assert f"rank {rank} of 2 did not answer" in found.message
