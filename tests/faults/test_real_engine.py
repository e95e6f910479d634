"""The harm that only the real engine can show to be survived: weights and numbers are those of a run left alone, bit for bit."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.ground import Ground
from tests.stack import wait_for

pytestmark = pytest.mark.faults
STEPS = 16


def test_killed_in_the_middle_of_a_step(field: Ground) -> None:
    job_id = field.submit(steps=STEPS)
    field.reach(job_id, 5)
    field.engine(job_id).kill()
    job = field.end(job_id, "succeeded", field.like(STEPS))
    assert (job.epoch, job.crashes) == (2, 1)
    assert job.resume_from is not None
    assert int(job.resume_from[-6:]) >= 4, "from the last complete one, and not from the start"


def test_killed_while_a_checkpoint_is_written(field: Ground) -> None:
    job_id = field.submit(steps=STEPS, checkpoints={"resume_every": 1})
    field.reach(job_id, 4)
    parent = field.artifacts.attempt_dir(job_id, 1) / "checkpoints"
    engine = field.engine(job_id)
    (half,) = stop_in_a_checkpoint(engine, parent)
    engine.kill()
    job = field.end(job_id, "succeeded", field.like(STEPS))
    assert (job.epoch, job.crashes) == (2, 1)
    assert job.resume_from is not None, "there was a whole one before"
    assert int(job.resume_from[-6:]) < int(half.name.split("-")[2]), "the one before"
    wait_for(lambda: not half.exists(), "the half written one to be deleted")


def stop_in_a_checkpoint(engine: psutil.Process, parent: Path) -> list[Path]:
    """SIGSTOP the engine while a resume state is half written."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "no checkpoint was caught half written"
        if any(parent.glob(".tmp-resume-*")):
            engine.suspend()
            if found := list(parent.glob(".tmp-resume-*")):
                return found
            engine.resume()


def test_stopped_by_a_signal_it_is_called_stalled_and_goes_on(field: Ground) -> None:
    job_id = field.submit(steps=STEPS)
    field.reach(job_id, 3)
    engine = field.engine(job_id)
    before = field.story(job_id).count("job.stalled")
    engine.suspend()
    wait_for(lambda: field.story(job_id).count("job.stalled") > before, "the job to be called stalled")
    assert str(field.client.job(job_id).status_reason).startswith("Stalled: no step")
    engine.resume()
    job = field.end(job_id, "succeeded", field.like(STEPS))
    assert (job.epoch, job.crashes, job.worker_losses) == (1, 0, 0)
    assert field.story(job_id).count("job.recovered") == before + 1


def test_a_worker_killed_and_drained_in_turn(field: Ground) -> None:
    job_id = field.submit(steps=STEPS)
    field.reach(job_id, 3)
    field.kill("worker")
    field.restart("worker")
    wait_for(lambda: field.job(job_id).epoch == 2, "the second attempt")
    field.reach(job_id, 2, epoch=2)
    assert field.leave("worker") == 0
    field.restart("worker")
    job = field.end(job_id, "succeeded", field.like(STEPS))
    assert (job.epoch, job.worker_losses, job.preemptions, job.crashes) == (3, 1, 1, 0)


def test_every_checkpoint_spoilt_it_starts_over_and_says_so(field: Ground) -> None:
    job_id = field.submit(steps=STEPS)
    field.reach(job_id, 7)
    field.kill("dispatcher")
    engine = field.engine(job_id)
    engine.kill()
    wait_for(lambda: field.artifacts.outcome(job_id, 1), "the verdict")
    for weights in spoilt(field.artifacts.attempt_dir(job_id, 1)):
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    field.restart("dispatcher")
    job = field.end(job_id, "succeeded", field.like(STEPS))
    assert (job.epoch, job.resume_from) == (2, None)
    assert "checkpoint.damaged" in field.story(job_id)


def spoilt(attempt: Path) -> list[Path]:
    found = sorted(attempt.glob("checkpoints/resume-*/weights.safetensors"))
    assert found
    return found


def test_the_host_goes_down_and_comes_up(field: Ground) -> None:
    """Every process of the server at once, engines included; afterwards all of it starts from what is on disk."""
    jobs = [field.submit(steps=STEPS) for _ in range(2)]
    field.reach(jobs[0], 5)
    victims = [process for name in field.stack.children for process in family(field.process(name))] + field.engines()
    for process in victims:
        process.send_signal(signal.SIGKILL)
    for child in field.stack.children.values():
        child.kill()
    wait_for(lambda: not any(process.is_running() for process in victims), "every process to be gone", 20)
    for name in ("valkey", "api", "dispatcher"):
        field.restart(name)
    field.restart("worker")
    for job_id in jobs:
        field.end(job_id, "succeeded", field.like(STEPS))
    assert field.job(jobs[0]).epoch == 2


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def test_an_attempt_directory_that_vanishes_ends_the_attempt_and_not_the_job(field: Ground) -> None:
    """Its open files are writable for ever; without a look the engine would train on, followed by nobody."""
    job_id = field.submit(steps=STEPS)
    field.reach(job_id, 5)
    engine = field.engine(job_id)
    engine.suspend()
    shutil.rmtree(field.artifacts.attempt_dir(job_id, 1))
    engine.resume()
    job = field.end(job_id, "succeeded", field.like(STEPS))
    assert (job.epoch, job.crashes, job.worker_losses) == (2, 1, 0)
    crashed = next(event for event in field.ledger.events(job_id).data if event.type == "job.queued")
    assert "has vanished" in crashed.message


def test_a_checkpoint_directory_made_unwritable_stops_no_training(field: Ground) -> None:
    """A file where the directory should be: every write is refused as by a full or read-only disk, until it is mended."""
    job_id = field.submit(steps=STEPS)
    attempt = field.artifacts.attempt_dir(job_id, 1)
    obstacle = attempt / "checkpoints"
    wait_for(lambda: field.written(job_id) >= 3, "three steps")
    shutil.rmtree(obstacle, ignore_errors=True)
    obstacle.write_text("")
    wait_for(lambda: "checkpoint.failed" in field.story(job_id), "the event")
    obstacle.unlink()
    job = field.end(job_id, "succeeded", field.like(STEPS))
    assert job.epoch == 1
    story = field.story(job_id)
    assert story.index("checkpoint.failed") < max(number for number, kind in enumerate(story) if kind == "checkpoint.saved")
