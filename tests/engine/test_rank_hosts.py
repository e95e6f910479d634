"""One job over two hosts: two parents with ranks of their own that meet at an address. Here both hosts are this one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from grpo_engine.contract.event import EXIT_CONFIG, EXIT_SUCCEEDED
from grpo_engine.contract.resources import Resources
from grpo_engine.device import choose_device
from grpo_engine.rank_processes import verdict_path
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, start, text_of, train
from tests.engine.test_rank_processes import crew, published
from tests.stack import wait_for

STEPS = 2
PATIENCE_S = 60
DEADLINE_S = 400
"""For a machine that does much else: torch takes its time to load in four processes."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("hosts"))


def spec_of(job: Path, ranks: int, steps: int = STEPS, **resources: Any) -> dict[str, Any]:
    patience = {"rank_timeout_s": PATIENCE_S} if ranks > 1 else {}
    return make_spec(job, limits={"num_steps": steps}, resources={"cpu_ranks": ranks, **patience, **resources})


def hosts() -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"count": 2, "address": f"127.0.0.1:{free.getsockname()[1]}", "interface": "lo"}


def second_host(run_dir: Path, number: int = 1) -> subprocess.Popen[bytes]:
    """What the operator starts on the other host."""
    with (run_dir / "second.log").open("wb") as log:
        command = [sys.executable, "-m", "grpo_engine", str(run_dir), "--host", str(number), "--interface", "127.0.0.1"]
        return subprocess.Popen(command, stdout=log, stderr=log)


@contextmanager
def both(run_dir: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    parents = [start(run_dir), second_host(run_dir)]
    try:
        yield parents
    finally:
        for parent in parents:
            parent.kill()
            parent.wait()
        wait_for(lambda: not crew(run_dir), "the ranks to be gone", 20)


@pytest.mark.faults
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 4), ("fsdp", 2)])
def test_two_hosts_do_the_job_of_one_process(job: Path, strategy: str, ranks: int) -> None:
    alone = job / "attempts" / "alone"
    if not alone.exists():
        train(job, "alone", spec_of(job, 1))
    run_dir = make_run(job, strategy, spec_of(job, ranks, strategy=strategy), hosts=hosts())
    with both(run_dir) as parents:
        assert [parent.wait(timeout=DEADLINE_S) for parent in parents] == [EXIT_SUCCEEDED] * 2, (run_dir / "engine.log").read_text()
    assert outcome(run_dir).status == "succeeded"
    assert events(run_dir, "engine.started")[0].data["hosts"] == 2
    assert sorted(series(run_dir)) == list(range(1, STEPS + 1))
    weights = published(run_dir, STEPS)
    for name, weight in published(alone, STEPS).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.faults
def test_a_rank_killed_on_the_second_host_ends_both_and_is_named(job: Path) -> None:
    run_dir = make_run(job, "killed", spec_of(job, 2, 100_000), hosts=hosts())
    with both(run_dir) as (first, second):
        wait_for(lambda: "step.completed" in text_of(run_dir), "the first step", DEADLINE_S)
        (victim,) = (member for member in psutil.Process(second.pid).children() if member.is_running())
        victim.kill()
        assert (first.wait(timeout=DEADLINE_S), second.wait(timeout=DEADLINE_S)) == (1, 9)
        assert not crew(run_dir)
    found = outcome(run_dir)
    assert (found.status, found.reason, found.retryable) == ("failed", "crash", True)
    assert "rank 1 of 2 was ended by SIGKILL" in found.message
    assert verdict_path(run_dir, 1).exists()


@pytest.mark.faults
def test_when_the_first_host_is_cancelled_the_second_ends_by_itself(job: Path) -> None:
    run_dir = make_run(job, "cancelled", spec_of(job, 2, 100_000, strategy="fsdp"), hosts=hosts())
    with both(run_dir) as (first, second):
        wait_for(lambda: "step.completed" in text_of(run_dir), "the first step", DEADLINE_S)
        first.terminate()
        first.wait(timeout=DEADLINE_S)
        assert second.wait(timeout=DEADLINE_S) == 1
        assert not crew(run_dir)


@pytest.mark.parametrize(
    ("name", "ranks", "dispatch", "number", "words"),
    [
        ("none", 2, {}, 1, "names no hosts"),
        ("third", 2, {"hosts": {"count": 2, "address": "h:1", "interface": "lo"}}, 2, "no host number 2"),
        ("uneven", 3, {"hosts": {"count": 2, "address": "h:1", "interface": "lo"}}, 1, "3 ranks cannot be divided equally over 2 hosts"),
    ],
)
def test_what_cannot_be_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], name: str, ranks: int, dispatch: dict[str, Any], number: int, words: str
) -> None:
    from grpo_engine.__main__ import main

    run_dir = make_run(job, name, spec_of(job, ranks), **dispatch)
    assert main([str(run_dir), "--host", str(number)]) == EXIT_CONFIG
    assert words in capsys.readouterr().err
    assert not (run_dir / "outcome.json").exists(), "the verdict is the first host's"


def test_each_host_gives_its_part_of_the_gpus() -> None:
    resources = Resources.model_validate_json(json.dumps({"gpus": 2 * (torch.cuda.device_count() + 1)}))
    with pytest.raises(Exception, match=f"{torch.cuda.device_count() + 1} GPUs were asked for"):
        choose_device(resources, 0, hosts=2)
