"""Attempts that die, do not die, come twice, get lost: the job goes on from its checkpoint and ends as if left alone."""

from __future__ import annotations

import base64
import json
import pickle
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from api.client.errors import ApiError
from jobs.lifecycle import State
from tests.faults.ground import Ground
from tests.stack import wait_for


@pytest.mark.parametrize("name", ["SIGSEGV", "exit-1"])
def test_an_engine_that_dies_is_followed_by_one_that_resumes(yard: Ground, name: str) -> None:
    job_id = yard.submit(f"{name}@8")
    job = yard.end(job_id, "succeeded", yard.like())
    assert (job.epoch, job.crashes, job.worker_losses, job.preemptions) == (2, 1, 0, 0)
    crashed = next(event for event in yard.ledger.events(job_id).data if event.type == "job.queued")
    assert name.replace("exit-1", "status 1") in crashed.message
    assert job.resume_from == "attempts/1/checkpoints/resume-000006"


def test_an_engine_killed_from_outside_is_retried_from_its_last_checkpoint(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.1")
    yard.reach(job_id, 5)
    yard.engine(job_id).kill()
    job = yard.end(job_id, "succeeded", yard.like())
    assert (job.epoch, job.crashes) == (2, 1)
    rewound = next(event for event in yard.ledger.events(job_id).data if event.type == "run.rewound")
    assert rewound.data["to_step"] >= 4


def test_an_engine_and_a_helper_that_ignore_sigterm_are_gone_after_a_cancel(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.05 ignore_sigterm helper hang@6")
    yard.reach(job_id, 5)
    yard.client.cancel(job_id)
    job = yard.end(job_id, "cancelled")
    assert job.epoch == 1


@pytest.mark.faults
def test_a_killed_supervisor_costs_a_stretch(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.05 helper", steps=12)
    yard.reach(job_id, 5)
    yard.pool_child(job_id).kill()
    job = yard.end(job_id, "succeeded", yard.like())
    assert (job.epoch, job.crashes, job.worker_losses) == (2, 0, 1)


@pytest.mark.faults
def test_a_killed_worker_takes_its_engine_along_and_the_next_one_cleans_up(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.05 helper")
    yard.reach(job_id, 5)
    yard.kill("worker")
    wait_for(lambda: not any("scripted_engine" in " ".join(engine.cmdline()) for engine in yard.engines(job_id)), "the engine to follow")
    yard.restart("worker")
    job = yard.end(job_id, "succeeded", yard.like())
    assert (job.epoch, job.crashes, job.worker_losses) == (2, 0, 1)


@pytest.mark.faults
def test_a_deploy_drains_and_costs_no_budget(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.1 resume_every=100")
    yard.reach(job_id, 5)
    assert yard.leave("worker") == 0
    first = yard.written(job_id)
    yard.restart("worker")
    job = yard.end(job_id, "succeeded", yard.like())
    assert (job.epoch, job.crashes, job.worker_losses, job.preemptions) == (2, 0, 0, 1)
    assert yard.written(job_id, 2) == 12 - first, "no step is done twice"


@pytest.mark.faults
def test_a_deploy_that_loses_patience_resumes_from_the_periodic_checkpoint(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.05 hang@8")
    yard.reach(job_id, 7)
    yard.signal("worker", signal.SIGTERM)
    told = yard.artifacts.attempt_dir(job_id, 1) / "commands.jsonl"
    wait_for(lambda: told.exists() and '"drain"' in told.read_text(), "the engine to be asked to stop")
    yard.kill("worker")
    yard.restart("worker")
    job = yard.end(job_id, "succeeded", yard.like())
    assert (job.epoch, job.resume_from) == (2, "attempts/1/checkpoints/resume-000006")


def test_a_second_delivery_is_dropped_while_the_first_runs_and_after_success(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.05")
    yard.reach(job_id, 2)
    before = yard.log("worker").count("duplicate_delivery")
    yard.deliver(job_id, 1)
    yard.end(job_id, "succeeded", yard.like())
    yard.deliver(job_id, 1)
    wait_for(lambda: yard.log("worker").count("duplicate_delivery") >= before + 2, "both to be dropped")
    assert yard.oracles.judge(job_id, "succeeded", yard.like()).epoch == 1
    assert yard.artifacts.epochs(job_id) == [1]
    wait_for(lambda: yard.story(job_id).count("attempt.duplicate_delivery") == 2, "the history to tell of both")


def test_a_message_lost_between_queue_and_claim_is_sent_again(yard: Ground) -> None:
    blocker = yard.submit("step_s=0.1", steps=30)
    yard.reach(blocker, 1)
    job_id = yard.submit()
    with yard.redis() as client:
        wait_for(lambda: client.rpop("grpo:grpo-cpu"), "the message, to lose it")
    assert yard.end(job_id, "succeeded", yard.like()).epoch == 1
    yard.end(blocker, "succeeded")


class Mine:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def body(arguments: list[object]) -> str:
    """A Celery message's body."""
    return base64.b64encode(json.dumps([arguments, {}, {}]).encode()).decode()


def test_garbage_in_the_queue_is_thrown_away_and_the_next_job_runs(yard: Ground, tmp_path: Path) -> None:
    mine = pickle.dumps(Mine(tmp_path / "stepped on"))
    with yard.redis() as client:
        blocker = yard.submit("step_s=0.1")
        yard.reach(blocker, 1)
        model = yard.submit()
        message = wait_for(lambda: client.lrange("grpo:grpo-cpu", 0, -1), "a message to copy")[0]
        content = json.loads(message)
        wrong_arity = {**content, "body": body([])}
        unknown = {**content, "headers": {**content["headers"], "task": "os.system"}}
        pickled = {**content, "content-type": "application/x-python-serialize", "body": base64.b64encode(mine).decode()}
        foreign = {**content, "headers": {**content["headers"], "id": "x"}, "body": body(["../../etc", 1])}
        garbage = ["not json", "{}", "[1]", mine, *map(json.dumps, (wrong_arity, unknown, pickled, foreign))]
        client.rpush("grpo:grpo-cpu", *garbage)
    worker = yard.process("worker")
    job_id = yard.submit()
    for one in (blocker, model, job_id):
        yard.end(one, "succeeded", yard.like())
    assert worker.is_running()
    assert yard.process("worker").pid == worker.pid
    assert list(tmp_path.iterdir()) == [], "a pickle was opened"


def test_a_job_that_always_dies_at_the_same_step_is_poison_and_the_queue_goes_on(yard: Ground) -> None:
    poison = yard.submit("SIGKILL@3!")
    behind = yard.submit()
    assert yard.end(behind, "succeeded", yard.like()).epoch == 1
    job = yard.end(poison, "failed")
    assert job.error is not None
    assert (job.error.code, job.step) == ("poison", 2)
    assert job.epoch == yard.settings.max_stuck_attempts


def cancel(yard: Ground, job_id: str) -> int:
    """Cancel twice; 200, or the status of the refusal."""
    try:
        yard.client.cancel(job_id)
        yard.client.cancel(job_id)
    except ApiError as error:
        return error.status
    return 200


def test_a_cancel_at_any_moment_is_final_and_repeatable(yard: Ground) -> None:
    """Nobody but the cancel ends these jobs: they hang in their last step."""
    dice = random.Random(51)
    for goal in (-1, 0, *(dice.randint(1, 7) for _ in range(2))):
        job_id = yard.submit("step_s=0.02 hang@8", steps=8)
        if goal >= 0:
            wait_for(lambda job_id=job_id, goal=goal: yard.job(job_id).epoch and yard.written(job_id) >= goal, "the moment")
        assert cancel(yard, job_id) == 200
        yard.end(job_id, "cancelled", timeout_s=30)
        assert cancel(yard, job_id) == 200, "again, when it is over"
    done = yard.submit(steps=1)
    yard.end(done, "succeeded")
    assert cancel(yard, done) == 409
    yard.oracles.judge(done, "succeeded")


@pytest.mark.faults
def test_a_cancel_while_no_worker_lives_is_honoured(yard: Ground) -> None:
    yard.kill("worker")
    job_id = yard.submit()
    wait_for(lambda: yard.job(job_id).state is State.DISPATCHED, "the dispatch")
    yard.client.cancel(job_id)
    yard.restart("worker")
    after = yard.submit()
    yard.end(after, "succeeded", yard.like())
    yard.end(job_id, "cancelled")
    assert yard.written(job_id) == 0


@pytest.mark.faults
def test_a_dispatcher_killed_at_any_moment_loses_no_job(yard: Ground) -> None:
    dice = random.Random(31)
    jobs = []
    for _ in range(3):
        jobs += [yard.submit() for _ in range(dice.randint(1, 3))]
        wait_for(lambda newest=jobs[-1]: yard.job(newest).epoch == 1 or dice.random() < 0.2, "a moment")
        yard.kill("dispatcher")
        yard.restart("dispatcher")
    for job_id in jobs:
        assert yard.end(job_id, "succeeded", yard.like()).epoch == 1


@pytest.mark.faults
def test_an_attempt_directory_that_vanishes_fails_the_attempt_and_not_the_job(yard: Ground) -> None:
    job_id = yard.submit("step_s=0.05 hang@7")
    yard.reach(job_id, 6)
    wait_for(lambda: yard.job(job_id).step == 6, "the database to know six steps")
    engine = yard.engine(job_id)
    shutil.rmtree(yard.artifacts.attempt_dir(job_id, 1))
    engine.kill()
    job = yard.end(job_id, "succeeded", yard.like())
    assert (job.epoch, job.crashes) == (2, 1)
