"""The control loop on a real Valkey and a real database, turn by turn, with a clock the test moves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from grpo_engine.contract.command import Dispatch
from jobs.dispatcher import Dispatcher
from jobs.ledger import Ledger, open_ledger
from jobs.lifecycle import State, Wanted
from jobs.live import Live, WantedNote
from jobs.notices import Notice
from jobs.queue import CPU_QUEUE, message_ids, task_id
from jobs.settings import Settings, bare_environment
from tests.conftest import ValkeyServer
from tests.jobs.makers import FakeAttempt, make_job


class Clock:
    """Monotonic seconds under the test's control."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Room:
    """A dispatcher, the Redis it talks to, and the seconds it lives by."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ledger = open_ledger(settings)
        self.live = Live.connect(settings)
        self.clock = Clock()
        self.dispatcher = Dispatcher(self.ledger, Live.connect(settings), settings, self.clock)

    def turn(self, after_s: float = 0.0) -> None:
        """One look round, `after_s` later."""
        self.clock.now += after_s
        self.dispatcher.turn()

    def wait(self, seconds: float, each: Callable[[], object] = lambda: None) -> None:
        """Let time pass turn by turn, so that the dispatcher never looks asleep."""
        step = self.settings.lease_ttl_s / 4
        for _ in range(int(seconds / step) + 1):
            each()
            self.turn(step)

    def messages(self) -> list[str]:
        return sorted(message_ids(self.live.queued_messages(CPU_QUEUE)))

    def pop_message(self) -> None:
        """Lose the oldest message, as a worker that dies between BRPOP and claim."""
        with redis.Redis.from_url(self.settings.redis_url) as client:
            assert client.rpop(f"grpo:{CPU_QUEUE}") is not None

    def start(self, job_id: str) -> FakeAttempt:
        """Play the worker: take the message, claim, hold the lease."""
        self.turn()
        job = self.ledger.get_job(job_id)
        assert task_id(job_id, job.epoch) in self.messages()
        self.pop_message()
        attempt = FakeAttempt(self.ledger.artifacts, job_id, job.epoch)
        assert attempt.claim()
        self.live.renew_lease(job_id, "w1", job.epoch)
        self.turn()
        assert self.ledger.get_job(job_id).state is State.RUNNING
        return attempt

    def publish(self, attempt: FakeAttempt) -> None:
        """Play the supervisor: everything the engine said, into the stream."""
        for event in attempt.events:
            self.live.publish_event(attempt.job_id, event.to_line(), event.epoch, event.seq)

    def state(self, job_id: str) -> State:
        return self.ledger.get_job(job_id).state

    def close(self) -> None:
        self.dispatcher.close()
        self.live.close()


@pytest.fixture
def room(settings: Settings) -> Iterator[Room]:
    room = Room(settings)
    yield room
    room.close()


@pytest.fixture
def own_room(settings: Settings, own_valkey: ValkeyServer) -> Iterator[Room]:
    """With a Valkey that the test may harm."""
    room = Room(dataclasses.replace(settings, redis_url=own_valkey.url, redis_timeout_s=0.3))
    yield room
    room.close()


# Down: from the row to the worker


def test_a_queued_job_gets_an_epoch_a_dispatch_and_a_message(room: Room) -> None:
    job = make_job(room.ledger, seed=7)
    room.turn()
    dispatched = room.ledger.get_job(job.id)
    assert (dispatched.state, dispatched.epoch, dispatched.status) == (State.DISPATCHED, 1, "queued")
    assert dispatched.published_at is not None
    assert room.messages() == [task_id(job.id, 1)]
    assert room.live.get_wanted(job.id) == WantedNote(1, "run")
    text = room.live.get_dispatch(job.id, 1)
    assert text is not None
    dispatch = Dispatch.model_validate_json(text)
    assert dispatch.spec == job.spec
    assert dispatch.training_file is not None
    assert (room.ledger.artifacts.job_dir(job.id) / dispatch.training_file).is_file()
    assert dispatch.resume_from is None
    room.wait(5)
    assert room.messages() == [task_id(job.id, 1)], "its message is still in the queue, so no second one is sent"


def test_a_lost_message_is_published_again(room: Room) -> None:
    job = make_job(room.ledger)
    room.turn()
    room.pop_message()
    room.wait(0.5)
    assert room.messages() == []
    room.wait(room.settings.republish_after_s + room.settings.lease_ttl_s)
    assert room.messages() == [task_id(job.id, 1)]
    assert room.ledger.get_job(job.id).epoch == 1


def test_a_crash_between_the_transition_and_the_message_is_made_good(room: Room) -> None:
    job = make_job(room.ledger)
    assert room.ledger.dispatch(job.id, from_epoch=0) is not None
    room.turn()
    assert room.messages() == [task_id(job.id, 1)]
    assert room.live.get_dispatch(job.id, 1) is not None


def test_two_dispatchers_have_one_effect(room: Room) -> None:
    other = Room(room.settings)
    jobs = [make_job(room.ledger) for _ in range(5)]
    for _ in range(3):
        room.turn()
        other.turn()
    assert room.messages() == sorted(task_id(job.id, 1) for job in jobs)
    with redis.Redis.from_url(room.settings.redis_url) as client:
        assert client.llen(f"grpo:{CPU_QUEUE}") == 5
    other.close()


def test_cancel_pause_and_commands_reach_the_worker(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    command = room.ledger.add_command(job.id, kind="set", beta=0.5).command
    room.turn()
    assert room.live.commands(job.id) == [command]
    attempt.event("control.applied", 1, command=1, effective_step=1)
    room.publish(attempt)
    room.turn()
    assert room.live.commands(job.id) == [], "what was answered is not sent again"
    room.ledger.request(job.id, "pause")
    room.turn()
    assert room.live.get_wanted(job.id) == WantedNote(1, "pause")
    room.ledger.request(job.id, "cancel")
    room.turn()
    assert room.live.get_wanted(job.id) == WantedNote(1, "cancel")
    attempt.end("stopped", "cancel")
    room.turn()
    assert room.state(job.id) is State.CANCELLED
    assert room.live.get_wanted(job.id) == WantedNote(1, "cancel")


# Up: from the worker to the row


def test_what_workers_have_to_say_enters_the_history_once_and_garbage_does_not(room: Room) -> None:
    job = make_job(room.ledger)
    notice = Notice(type="attempt.duplicate_delivery", job_id=job.id, epoch=1, worker="w", message="It came twice.")
    strange = [notice.model_copy(update={"job_id": "ftjob-nobody"}).model_dump_json(), notice.model_dump_json().replace("dupl", "d")]
    for text in ["no JSON", *strange, notice.model_dump_json()]:
        room.live.post_notice(text)
    room.turn()
    room.turn()
    found = room.ledger.events(job.id, types=["attempt.duplicate_delivery"]).data
    assert [(event.epoch, event.message, event.data) for event in found] == [(1, "It came twice.", {"worker": "w"})]
    assert room.live.take_notice() is None


def test_events_arrive_from_the_stream_and_the_verdict_ends_the_job(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    attempt.event("engine.started")
    attempt.step(1)
    room.publish(attempt)
    room.turn()
    assert room.ledger.get_job(job.id).step == 1
    attempt.step(2)
    attempt.checkpoint(2, "published")
    attempt.event("run.finished")
    attempt.end("succeeded", "completed", last_step=2)
    room.turn()
    done = room.ledger.get_job(job.id)
    assert (done.state, done.step, done.ingested) == (State.SUCCEEDED, 2, (1, 5))
    assert [record.step for record in room.ledger.checkpoints(job.id).data] == [2]
    room.wait(3)
    assert room.messages() == []


def test_a_stream_with_holes_is_filled_from_the_file(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    for number in range(1, 10):
        event = attempt.step(number)
        if number not in (2, 5, 6):
            room.live.publish_event(job.id, event.to_line(), 1, event.seq)
    room.turn()
    assert [row.seq for row in room.ledger.metrics(job.id)] == list(range(1, 10))
    assert room.ledger.integrity(job.id).gaps == 0


def test_garbage_in_the_stream_costs_nothing(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    attempt.step(1)
    room.live.publish_event(job.id, "not json", 1, 1)
    event = attempt.step(2)
    room.live.publish_event(job.id, attempt.events[0].to_line(), 1, 2)
    room.turn()
    assert [row.seq for row in room.ledger.metrics(job.id)] == [1, event.seq]


def test_what_never_reached_redis_is_found_in_the_file(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    attempt.step(1)
    room.wait(room.settings.file_check_s * 2)
    assert room.ledger.get_job(job.id).step == 1


# Resuming


def test_an_attempt_that_crashed_is_followed_by_one_that_resumes(room: Room) -> None:
    job = make_job(room.ledger)
    first = room.start(job.id)
    first.step(1)
    first.checkpoint(1)
    first.step(2)
    first.end("failed", "crash", retryable=True, last_step=2)
    room.turn()
    assert room.ledger.get_job(job.id).crashes == 1
    deadline = time.monotonic() + 20
    while room.ledger.get_job(job.id).epoch < 2:
        assert time.monotonic() < deadline
        room.turn()
    text = room.live.get_dispatch(job.id, 2)
    assert text is not None
    assert json.loads(text)["resume_from"] == "attempts/1/checkpoints/resume-000001"
    assert room.live.get_wanted(job.id) == WantedNote(2, "run"), "the first attempt learns that it is fenced"


@pytest.mark.parametrize("harm", ["flip", "cut", "extra", "link", "manifest", "manifest cut", "manifest of another step"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(room: Room, harm: str, tmp_path: Path) -> None:
    job = make_job(room.ledger)
    first = room.start(job.id)
    first.checkpoint(1)
    first.checkpoint(2)
    directory = room.ledger.artifacts.checkpoint_dir(job.id, 1, "resume-000002")
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    if harm == "flip":
        weights.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif harm == "cut":
        weights.write_bytes(content[:-1])
    elif harm == "extra":
        (directory / "evil.bin").write_bytes(b"x")
    elif harm == "link":
        target = tmp_path / "copy"
        weights.rename(target)
        weights.symlink_to(target)
    elif harm == "manifest":
        (directory / "manifest.json").unlink()
    elif harm == "manifest cut":
        (directory / "manifest.json").write_bytes((directory / "manifest.json").read_bytes()[:-3])
    else:
        manifest = json.loads((directory / "manifest.json").read_text())
        (directory / "manifest.json").write_text(json.dumps({**manifest, "step": 9}))
    first.end("stopped", "drain", retryable=True, last_step=2)
    room.turn()
    resumed = room.ledger.get_job(job.id)
    assert (resumed.epoch, resumed.resume_from) == (2, "attempts/1/checkpoints/resume-000001")
    assert [event.type for event in room.ledger.events(job.id, types=["checkpoint.damaged"]).data] == ["checkpoint.damaged"]


def test_without_any_good_checkpoint_it_starts_over_and_says_so(room: Room) -> None:
    job = make_job(room.ledger)
    first = room.start(job.id)
    room.ledger.add_command(job.id, kind="set", beta=0.5)
    first.event("control.applied", 1, command=1, effective_step=1)
    first.checkpoint(1)
    (room.ledger.artifacts.checkpoint_dir(job.id, 1, "resume-000001") / "model.safetensors").write_bytes(b"")
    first.end("stopped", "drain", retryable=True, last_step=1)
    room.turn()
    assert room.ledger.get_job(job.id).resume_from is None
    dispatched = room.ledger.events(job.id, types=["job.dispatched"]).data[-1]
    assert "from the start" in dispatched.message
    assert [record.status for record in room.ledger.commands(job.id)] == ["pending"], "the changed setting is asked for again"


def test_a_checkpoint_the_ledger_did_not_accept_is_not_used(room: Room) -> None:
    job = make_job(room.ledger)
    first = room.start(job.id)
    first.checkpoint(1)
    room.turn()
    room.wait(room.settings.lost_after_s + 2 * room.settings.lease_ttl_s + 2, lambda: _expire(room, job.id))
    assert room.ledger.get_job(job.id).epoch == 2
    first.checkpoint(5)
    second = room.start(job.id)
    second.end("stopped", "drain", retryable=True)
    room.turn()
    assert room.ledger.get_job(job.id).resume_from == "attempts/1/checkpoints/resume-000001"


def test_old_checkpoints_are_retired_and_pinned_ones_stay(room: Room) -> None:
    job = make_job(room.ledger, grpo={"checkpoints": {"keep": 2}})
    attempt = room.start(job.id)
    for step in (1, 2, 3, 4):
        attempt.step(step)
        attempt.checkpoint(step, "published")
    attempt.checkpoint(4)
    room.wait(room.settings.file_check_s * 2)
    oldest = room.ledger.checkpoints(job.id, order="asc").data[0]
    room.ledger.mark_checkpoint(oldest.id, pinned=True)
    attempt.end("succeeded", "completed", last_step=4)
    room.turn()
    room.turn()
    assert [record.step for record in room.ledger.checkpoints(job.id).data] == [4, 3, 1]
    left = sorted(path.name for path in (attempt.path / "checkpoints").iterdir())
    assert left == ["step-000001", "step-000003", "step-000004"], "the resume state of a finished job is gone, too"


def test_what_a_killed_engine_left_half_written_or_unannounced_goes(room: Room) -> None:
    """Each may be as large as the model; no list names them, so nobody else would delete them."""
    job = make_job(room.ledger)
    first = room.start(job.id)
    first.checkpoint(2)
    place = first.path / "checkpoints"
    for name in (".tmp-resume-000004-a", "resume-000004", "step-000004"):
        (place / name).mkdir()
    room.wait(room.settings.file_check_s * 2)
    assert len(list(place.iterdir())) == 4, "the engine may be writing"
    first.end("failed", "crash", retryable=True, last_step=3)
    room.turn()
    wait_until = room.clock.now + 60
    while room.ledger.get_job(job.id).epoch == 1 and room.clock.now < wait_until:
        room.turn(0.5)
    other = Room(room.settings)
    other.turn()
    other.close()
    left = sorted(path.name for path in place.iterdir())
    assert left == ["resume-000002", "step-000004"], "weights somebody may want are never taken for debris"


def test_a_new_dispatcher_retires_what_the_last_one_left(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    attempt.step(1)
    attempt.checkpoint(1)
    attempt.end("succeeded", "completed", last_step=1)
    outcome = room.ledger.artifacts.outcome(job.id, 1)
    assert outcome is not None
    room.ledger.ingest(job.id, attempt.events)
    room.ledger.settle(job.id, 1, outcome)
    other = Room(room.settings)
    other.turn()
    other.close()
    assert list((attempt.path / "checkpoints").iterdir()) == []


# Loss


def _expire(room: Room, job_id: str) -> None:
    """The worker is gone: nobody renews the lease."""
    with redis.Redis.from_url(room.settings.redis_url) as client:
        client.delete(f"grpo:job:{job_id}:lease")


def test_a_worker_that_vanished_loses_the_job_to_the_next(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    attempt.step(1)
    room.wait(room.settings.lease_ttl_s * 2)
    assert room.ledger.get_job(job.id).epoch == 1
    room.wait(room.settings.lost_after_s + room.settings.lease_ttl_s, lambda: _expire(room, job.id))
    again = room.ledger.get_job(job.id)
    assert (again.epoch, again.worker_losses, again.crashes, again.step) == (2, 1, 0, 1)
    verdict = room.ledger.artifacts.outcome(job.id, 1)
    assert verdict is not None, "an engine that lives behind a partition finds it there"
    assert (verdict.reason, verdict.retryable) == ("worker_lost", True)


def test_a_renewed_lease_keeps_the_job(room: Room) -> None:
    job = make_job(room.ledger)
    room.start(job.id)
    room.wait(room.settings.lost_after_s * 3, lambda: room.live.renew_lease(job.id, "w1", 1))
    assert (room.state(job.id), room.ledger.get_job(job.id).epoch) == (State.RUNNING, 1)


def test_nobody_is_judged_after_this_process_was_asleep(room: Room) -> None:
    job = make_job(room.ledger)
    room.start(job.id)
    room.wait(room.settings.lease_ttl_s * 2)
    _expire(room, job.id)
    room.turn(after_s=3600.0)
    room.live.renew_lease(job.id, "w1", 1)
    room.turn()
    assert room.ledger.get_job(job.id).epoch == 1


def test_cancel_of_a_job_whose_worker_is_gone_is_honoured(room: Room) -> None:
    job = make_job(room.ledger)
    room.start(job.id)
    room.ledger.request(job.id, "cancel")
    room.wait(room.settings.lease_ttl_s * 2 + room.settings.lost_after_s, lambda: _expire(room, job.id))
    assert room.state(job.id) is State.CANCELLED


def test_a_verdict_found_late_is_better_than_a_loss(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    attempt.step(1)
    attempt.end("succeeded", "completed", last_step=1)
    room.wait(room.settings.lost_after_s * 2, lambda: _expire(room, job.id))
    assert (room.state(job.id), room.ledger.get_job(job.id).worker_losses) == (State.SUCCEEDED, 0)


# Silence


def test_an_engine_that_says_nothing_is_called_stalled_until_it_speaks(room: Room) -> None:
    job = make_job(room.ledger)
    attempt = room.start(job.id)
    attempt.step(1)
    room.publish(attempt)
    room.turn()
    silence = max(room.settings.stalled_after_s, room.settings.lost_after_s) * 2
    room.wait(silence, lambda: room.live.renew_lease(job.id, "w1", 1))
    assert room.ledger.get_job(job.id).status_reason.startswith("Stalled: no step")
    assert (room.state(job.id), room.ledger.get_job(job.id).epoch) == (State.RUNNING, 1)
    other = Room(room.settings)
    other.turn()
    attempt.step(2)
    room.publish(attempt)
    other.turn()
    other.close()
    story = [event.type for event in room.ledger.events(job.id).data]
    assert (story.count("job.stalled"), story.count("job.recovered")) == (1, 1), "another dispatcher knows that it was stalled"
    assert room.ledger.get_job(job.id).status_reason == "Attempt 1 goes on."


# Redis in trouble


def test_while_redis_is_down_nothing_is_lost_and_nobody_is_judged(own_room: Room, own_valkey: ValkeyServer) -> None:
    room = own_room
    running, waiting = make_job(room.ledger), make_job(room.ledger)
    room.turn()
    attempt = FakeAttempt(room.ledger.artifacts, running.id, 1)
    attempt.claim()
    room.live.renew_lease(running.id, "w1", 1)
    room.turn()
    own_valkey.kill()
    late = make_job(room.ledger)
    for number in range(1, 5):
        attempt.step(number)
        room.turn(after_s=room.settings.lease_ttl_s)
    assert room.ledger.get_job(running.id).step == 4, "ingest goes on from the file"
    assert room.state(late.id) is State.QUEUED
    own_valkey.start()
    room.turn()
    assert room.state(late.id) is State.DISPATCHED
    assert room.messages() == [task_id(late.id, 1)], "what vanished waits one lease time"
    room.live.renew_lease(running.id, "w1", 1)
    room.wait(room.settings.lease_ttl_s * 2, lambda: room.live.renew_lease(running.id, "w1", 1))
    assert room.messages() == sorted([task_id(late.id, 1), task_id(waiting.id, 1)])
    assert room.live.get_dispatch(waiting.id, 1) is not None
    assert (room.state(running.id), room.ledger.get_job(running.id).epoch) == (State.RUNNING, 1)


def test_a_wipe_restores_what_supervisors_need_at_once(room: Room, valkey: ValkeyServer) -> None:
    job = make_job(room.ledger)
    room.start(job.id)
    room.ledger.request(job.id, "pause")
    room.ledger.add_command(job.id, kind="checkpoint")
    room.turn()
    generation = room.live.generation()
    valkey.wipe()
    room.turn()
    assert room.live.generation() == generation
    assert room.live.get_wanted(job.id) == WantedNote(1, "pause")
    assert [command.number for command in room.live.commands(job.id)] == [1]


def test_a_frozen_redis_does_not_stop_the_loop(own_room: Room, own_valkey: ValkeyServer) -> None:
    room = own_room
    job = make_job(room.ledger)
    own_valkey.freeze()
    room.turn()
    assert room.state(job.id) is State.QUEUED
    own_valkey.thaw()
    room.turn()
    assert room.state(job.id) is State.DISPATCHED


def test_a_read_only_redis_is_treated_as_down(own_room: Room, own_valkey: ValkeyServer) -> None:
    room = own_room
    running = make_job(room.ledger)
    room.start(running.id)
    with redis.Redis.from_url(own_valkey.url) as client:
        client.replicaof("127.0.0.1", 1)
        room.wait(room.settings.lost_after_s * 3)
        assert (room.state(running.id), room.ledger.get_job(running.id).epoch) == (State.RUNNING, 1)
        client.replicaof("NO", "ONE")


# Trouble of one job is not everybody's


def test_one_broken_job_does_not_stop_the_others(room: Room) -> None:
    broken, fine = make_job(room.ledger), make_job(room.ledger)
    first, second = None, None
    room.turn()
    first = FakeAttempt(room.ledger.artifacts, broken.id, 1)
    second = FakeAttempt(room.ledger.artifacts, fine.id, 1)
    first.claim()
    second.claim()
    room.turn()
    room.ledger.artifacts.events_path(broken.id, 1).mkdir()
    second.end("succeeded", "completed")
    room.wait(room.settings.file_check_s * 2)
    assert room.state(fine.id) is State.SUCCEEDED
    assert room.state(broken.id) is State.RUNNING


def test_a_withdrawn_attempt_is_queued_anew_when_its_request_failed(room: Room) -> None:
    job = make_job(room.ledger)
    room.turn()
    room.ledger.artifacts.claim(job.id, 1, "ledger")
    room.turn()
    again = room.ledger.get_job(job.id)
    assert (again.state, again.epoch, again.worker_losses, again.crashes) == (State.DISPATCHED, 2, 0, 0)


def test_a_clock_that_jumped_does_not_hold_a_job_back(room: Room) -> None:
    job = make_job(room.ledger)
    with room.ledger.database.write() as connection:
        connection.exec_driver_sql(f"UPDATE jobs SET not_before = {time.time() + 7200}")
    room.turn()
    assert room.state(job.id) is State.DISPATCHED


# The process


def test_the_process_works_and_ends_cleanly_on_sigterm(settings: Settings, ledger: Ledger) -> None:
    job = make_job(ledger)
    environment = {**bare_environment(), **settings.to_env()}
    with subprocess.Popen([sys.executable, "-m", "jobs.dispatcher"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while ledger.get_job(job.id).published_at is None:
            assert process.poll() is None
            assert time.monotonic() < deadline
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "dispatcher: stopped" in errors
    assert ledger.get_job(job.id).wanted is Wanted.RUN


def test_the_process_says_what_is_wrong_with_its_settings(settings: Settings) -> None:
    environment = {**bare_environment(), **settings.to_env(), "GRPO_POLLS": "1"}
    answer = subprocess.run([sys.executable, "-m", "jobs.dispatcher"], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.strip() == "grpo dispatcher: GRPO_POLLS is no setting; did you mean GRPO_POLL_S?"
