"""The real Celery worker process: deliveries, deaths, and leaving in good order."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import psutil

from jobs.queue import make_app
from tests.worker.room import Room, wait_for


def test_a_message_is_carried_out_by_a_process_without_torch(room: Room) -> None:
    worker = room.worker()
    attempt = room.job("steps=3")
    room.publish(attempt)
    outcome = wait_for(attempt.outcome, "the verdict")
    assert outcome.status == "succeeded"
    for pid in (worker.process.pid, worker.pool_child().pid):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_the_heartbeat_tells_what_the_worker_offers(room: Room) -> None:
    worker = room.worker()
    beat = next(beat for beat in room.live.workers().values() if beat["pid"] == worker.process.pid)
    assert beat["queues"] == ["grpo-cpu"]
    assert beat["devices"][0]["kind"] == "cpu"
    assert beat["devices"][0]["cores"] >= 1
    assert {"string_check", "regex", "math", "multi"} <= set(beat["graders"])
    first = beat["last_poll"]
    wait_for(lambda: max(beat["last_poll"] for beat in room.live.workers().values()) > first, "the consumer's loop to turn")


def test_a_second_delivery_is_dropped_while_the_first_runs(room: Room) -> None:
    worker = room.worker()
    other = room.worker()
    attempt = room.job("steps=1000 step_s=0.05")
    room.publish(attempt)
    wait_for(lambda: room.steps(attempt), "a step")
    room.publish(attempt)
    wait_for(lambda: "duplicate_delivery" in worker.log() + other.log(), "the second delivery to be dropped")
    assert len(room.engines()) == 1
    room.live.set_wanted(attempt.job_id, 1, "cancel")
    wait_for(attempt.outcome, "the verdict")


def test_garbage_in_the_queue_harms_nothing(room: Room) -> None:
    worker = room.worker()
    for garbage in ("not json", "{}", '{"body": "!!", "headers": {}, "properties": {}}'):
        room.live._redis.lpush("grpo:grpo-cpu", garbage)
    attempt = room.job("steps=2")
    room.publish(attempt)
    assert wait_for(attempt.outcome, "the verdict of the job behind the garbage").status == "succeeded"
    assert worker.process.poll() is None


def test_cancel_ends_a_stubborn_engine_and_its_helper_within_ten_seconds(room: Room) -> None:
    room.worker()
    attempt = room.job("steps=1000 ignore_sigterm helper")
    room.publish(attempt)
    wait_for(lambda: room.steps(attempt), "a step")
    room.live.set_wanted(attempt.job_id, 1, "cancel")
    outcome = wait_for(attempt.outcome, "the verdict", timeout_s=10)
    assert outcome.reason == "cancel"
    assert room.engines() == []


def test_a_killed_pool_child_takes_its_engine_along_and_the_worker_writes_the_verdict(room: Room) -> None:
    worker = room.worker()
    attempt = room.job("steps=1000 helper")
    room.publish(attempt)
    wait_for(lambda: room.steps(attempt), "a step")
    supervisor = attempt.supervisor()
    assert supervisor is not None
    psutil.Process(supervisor.pid).kill()
    outcome = wait_for(attempt.outcome, "the verdict")
    assert (outcome.status, outcome.reason, outcome.retryable) == ("failed", "worker_lost", True)
    assert outcome.last_step == room.steps(attempt)[-1]
    assert room.engines() == []
    again = room.job("steps=2")
    room.publish(again)
    assert wait_for(again.outcome, "the next job's verdict").status == "succeeded"
    assert worker.process.poll() is None


def test_a_killed_worker_takes_its_engine_along_and_the_next_one_settles_the_attempt(room: Room) -> None:
    worker = room.worker()
    attempt = room.job("steps=1000 helper")
    room.publish(attempt)
    wait_for(lambda: room.steps(attempt), "a step")
    engine = attempt.engine()
    assert engine is not None
    worker.process.kill()
    wait_for(lambda: not engine.is_alive(), "the engine to follow its worker")
    assert attempt.outcome() is None
    room.worker()
    outcome = attempt.outcome()
    assert outcome is not None
    assert outcome.reason == "worker_lost"
    assert room.engines() == []


def test_sigterm_drains_step_checkpoint_verdict_exit(room: Room) -> None:
    worker = room.worker()
    attempt = room.job("steps=1000 step_s=0.2")
    room.publish(attempt)
    wait_for(lambda: room.steps(attempt), "a step")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(timeout=20) == 0
    outcome = attempt.outcome()
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("stopped", "drain")
    assert outcome.resume_checkpoint is not None
    assert room.live.workers() == {}


def test_sigterm_does_not_wait_forever_for_a_hung_engine(room: Room) -> None:
    room.settings = dataclasses.replace(room.settings, drain_grace_s=0.5)
    worker = room.worker()
    attempt = room.job("steps=1000 hang@3")
    room.publish(attempt)
    wait_for(lambda: len(room.steps(attempt)) == 2, "the engine to hang")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(timeout=20) == 0
    outcome = attempt.outcome()
    assert outcome is not None
    assert (outcome.status, outcome.reason, outcome.retryable) == ("stopped", "drain", True)


def test_a_term_signal_to_the_whole_group_is_a_drain_and_not_a_crash(room: Room) -> None:
    worker = room.worker()
    attempt = room.job("steps=1000 step_s=0.05")
    room.publish(attempt)
    wait_for(lambda: room.steps(attempt), "a step")
    supervisor = attempt.supervisor()
    assert supervisor is not None
    for process in (*room.engines(), psutil.Process(supervisor.pid), psutil.Process(worker.process.pid)):
        process.terminate()
    assert worker.process.wait(timeout=20) == 0
    outcome = attempt.outcome()
    assert outcome is not None
    assert outcome.reason == "drain"


def test_a_deaf_worker_starts_itself_anew(room: Room) -> None:
    room.settings = dataclasses.replace(room.settings, deaf_after_s=1.0)
    worker = room.worker()
    make_app(room.settings).control.cancel_consumer("grpo-cpu", reply=True, timeout=5)
    attempt = room.job("steps=2")
    room.publish(attempt)
    assert wait_for(attempt.outcome, "the verdict").status == "succeeded"
    assert "starting anew" in worker.log()
    assert worker.process.poll() is None


def test_a_restarted_redis_is_found_again_for_the_running_job_and_the_next(fragile_room: Room) -> None:
    room = fragile_room
    room.worker()
    attempt = room.job("steps=40 step_s=0.05")
    room.publish(attempt)
    wait_for(lambda: room.steps(attempt), "a step")
    room.valkey.kill()
    before = len(room.steps(attempt))
    wait_for(lambda: len(room.steps(attempt)) > before + 3, "steps without Redis")
    room.valkey.start()
    assert wait_for(attempt.outcome, "the verdict").status == "succeeded"
    wait_for(lambda: len(room.streamed(attempt)) == 42, "the whole stream")
    again = room.job("steps=2")
    room.publish(again)
    assert wait_for(again.outcome, "the next job's verdict").status == "succeeded"
