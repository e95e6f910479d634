"""One attempt, supervised in this process: events up, commands down, and every way to end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import psutil
import pytest

from grpo_engine.contract.command import Command
from grpo_engine.contract.event import Outcome
from jobs.artifacts import LEDGER_CLAIM
from jobs.notices import Notice
from tests.worker.room import FAKE_ENGINE, Room, wait_for
from worker.attempt import Attempt
from worker.tasks import NotStarted, carry_out


def run(room: Room, attempt: Attempt) -> Outcome | None:
    return carry_out(attempt.job_id, attempt.epoch, room.live, room.settings, "worker-under-test", FAKE_ENGINE)


class Meanwhile:
    """Something done in a thread while the main thread supervises; its failure fails the test."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def __call__(self, action: object) -> None:
        def guarded() -> None:
            try:
                action()  # type: ignore[operator]
            except BaseException as error:  # noqa: BLE001 - handed to the main thread
                self._errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        assert self._errors == []


@pytest.fixture
def meanwhile() -> Iterator[Meanwhile]:
    helper = Meanwhile()
    yield helper
    helper.join()


def test_an_attempt_runs_to_its_end_and_its_words_reach_the_stream(room: Room) -> None:
    attempt = room.job("steps=3")
    outcome = run(room, attempt)
    assert outcome is not None
    assert (outcome.status, outcome.reason, outcome.last_step) == ("succeeded", "completed", 3)
    assert room.streamed(attempt) == [event.stream_id for event in room.events(attempt)] == ["1-1", "1-2", "1-3", "1-4", "1-5"]


def test_the_engine_carries_its_job_and_epoch_and_none_of_the_servers_secrets(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_API_KEY", "secret")
    monkeypatch.setenv("REDIS_URL", room.settings.redis_url)
    attempt = room.job()
    run(room, attempt)
    seen = room.events(attempt)[0].data["environment"]
    assert set(seen) == {"GRPO_JOB_ID", "GRPO_EPOCH", "GRPO_RUN_DIR", "GRPO_SUPERVISOR"}
    assert (seen["GRPO_JOB_ID"], seen["GRPO_EPOCH"]) == (attempt.job_id, "1")


def test_the_engine_is_the_kernels_first_choice_when_memory_runs_out(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=1000 step_s=0.05")

    def look() -> None:
        engine = wait_for(attempt.engine, "run.json")
        wait_for(lambda: room.steps(attempt), "a step")
        with open(f"/proc/{engine.pid}/oom_score_adj") as file:
            assert file.read().strip() == "500"
        room.live.set_wanted(attempt.job_id, 1, "cancel")

    meanwhile(look)
    run(room, attempt)


def test_a_claimed_attempt_is_dropped(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    attempt = room.job()
    assert run(room, attempt) is not None
    before = attempt.events_path.read_bytes()
    assert run(room, attempt) is None
    assert "duplicate_delivery" in caplog.text
    assert attempt.events_path.read_bytes() == before
    notice = Notice.model_validate_json(room.live.take_notice() or "")
    assert (notice.type, notice.job_id, notice.epoch) == ("attempt.duplicate_delivery", attempt.job_id, 1)


def test_a_withdrawn_attempt_is_dropped_and_is_no_duplicate(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    attempt = room.job()
    assert room.artifacts.claim(attempt.job_id, attempt.epoch, LEDGER_CLAIM)
    assert run(room, attempt) is None
    assert "duplicate_delivery" not in caplog.text
    assert room.live.take_notice() is None


def test_an_attempt_older_than_the_wanted_epoch_is_dropped_unclaimed(room: Room) -> None:
    attempt = room.job()
    room.live.set_wanted(attempt.job_id, 2, "run")
    assert run(room, attempt) is None
    assert not attempt.is_claimed


def test_without_a_dispatch_nothing_is_claimed(room: Room) -> None:
    attempt = Attempt(room.artifacts, "ftjob-unknown", 1)
    with pytest.raises(NotStarted, match="holds no dispatch"):
        run(room, attempt)
    assert not attempt.is_claimed


def test_a_spec_this_version_does_not_know_stays_unclaimed_for_another_worker(room: Room) -> None:
    attempt = room.job()
    note = json.loads(room.live.get_dispatch(attempt.job_id, 1) or "")
    note["spec"]["method"]["grpo"]["from_the_future"] = 1
    room.live.put_dispatch(attempt.job_id, 1, json.dumps(note))
    with pytest.raises(ValueError, match="from_the_future"):
        run(room, attempt)
    assert not attempt.is_claimed


def test_a_dispatch_may_not_reach_outside_the_job_directories(room: Room) -> None:
    attempt = room.job()
    note = json.loads(room.live.get_dispatch(attempt.job_id, 1) or "")
    room.live.put_dispatch(attempt.job_id, 1, json.dumps({**note, "training_file": "../../../etc/passwd"}))
    with pytest.raises(NotStarted, match="outside the job directories"):
        run(room, attempt)


@pytest.mark.parametrize(("wanted", "reason"), [("cancel", "cancel"), ("pause", "pause"), ("requeue", "drain")])
def test_what_was_wanted_before_the_start_is_honoured_without_an_engine(room: Room, wanted: str, reason: str) -> None:
    attempt = room.job(wanted=wanted)
    outcome = run(room, attempt)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("stopped", reason)
    assert attempt.engine() is None


def test_commands_reach_the_engine_once(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=1000 step_s=0.02")

    def steer() -> None:
        wait_for(lambda: room.steps(attempt), "a step")
        room.live.put_command(attempt.job_id, Command(number=1, type="set", beta=0.1))
        room.live.put_command(attempt.job_id, Command(number=2, type="set", beta=0.2))
        wait_for(lambda: sum(event.type == "control.applied" for event in room.events(attempt)) == 2, "two answers")
        room.live.set_wanted(attempt.job_id, 1, "cancel")

    meanwhile(steer)
    run(room, attempt)
    lines = (attempt.path / "commands.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 2]


def test_pause_lets_the_engine_save_and_stop(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=1000")

    def pause() -> None:
        wait_for(lambda: room.steps(attempt), "a step")
        room.live.set_wanted(attempt.job_id, 1, "pause")

    meanwhile(pause)
    outcome = run(room, attempt)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("stopped", "pause")
    assert outcome.resume_checkpoint == f"resume-{outcome.last_step:06d}"


@pytest.mark.parametrize(
    "script", ["steps=1000", "steps=1000 ignore_sigterm", "steps=1000 helper", "steps=1000 ignore_sigterm helper hang@3"]
)
def test_cancel_leaves_no_process_whatever_the_engine_does(room: Room, meanwhile: Meanwhile, script: str) -> None:
    attempt = room.job(f"steps=1000 {script}")

    def cancel() -> None:
        wait_for(lambda: len(room.steps(attempt)) >= 2, "two steps")
        assert len(room.engines()) == (2 if "helper" in script else 1)
        room.live.set_wanted(attempt.job_id, 1, "cancel")

    meanwhile(cancel)
    outcome = run(room, attempt)
    assert room.engines() == []
    assert outcome is not None
    assert (outcome.status, outcome.reason, outcome.retryable) == ("stopped", "cancel", False)
    assert outcome.last_step == room.steps(attempt)[-1]


def test_a_helper_left_behind_by_a_finished_engine_is_ended(room: Room) -> None:
    outcome = run(room, room.job("steps=2 helper"))
    assert outcome is not None
    assert outcome.status == "succeeded"
    assert room.engines() == []


def test_a_newer_epoch_stops_the_engine_and_silences_it(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=1000")
    streamed: list[str] = []

    def supersede() -> None:
        wait_for(lambda: len(room.streamed(attempt)) >= 3, "three events")
        room.live.set_wanted(attempt.job_id, 2, "run")
        room.live.publish_event(attempt.job_id, "{}", 2, 1)
        streamed.extend(room.streamed(attempt))

    meanwhile(supersede)
    outcome = run(room, attempt)
    assert outcome is not None
    assert outcome.reason == "superseded"
    assert room.streamed(attempt) == streamed
    assert room.live.lease(attempt.job_id) is None


def test_an_attempt_given_up_on_the_disk_is_ended_where_redis_says_nothing(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=1000")
    verdict = Outcome(status="failed", reason="worker_lost", message="not heard of", retryable=True, last_step=1)

    def give_up() -> None:
        wait_for(lambda: len(room.steps(attempt)) >= 2, "two steps")
        assert room.artifacts.write_outcome(attempt.job_id, 1, verdict)

    meanwhile(give_up)
    assert run(room, attempt) == verdict
    assert room.engines() == []


@pytest.mark.parametrize(
    ("script", "reason", "words", "retryable"),
    [
        ("exit=1@3", "crash", "status 1", True),
        ("exit=86@3", "config_error", "refused", False),
        ("exit=87@3", "nonfinite", "diverged", False),
        ("signal=SIGSEGV@3", "crash", "SIGSEGV", True),
        ("signal=SIGKILL@3", "crash", "SIGKILL", True),
        ("signal=SIGTERM@3", "crash", "SIGTERM", True),
    ],
)
def test_an_engine_that_dies_without_a_word_gets_a_verdict(room: Room, script: str, reason: str, words: str, retryable: bool) -> None:
    outcome = run(room, room.job(f"steps=9 {script}"))
    assert outcome is not None
    assert (outcome.status, outcome.reason, outcome.retryable, outcome.last_step) == ("failed", reason, retryable, 2)
    assert words in outcome.message


def test_an_absurd_sequence_number_is_kept_from_the_stream(room: Room) -> None:
    attempt = room.job("steps=4 absurd_seq@2")
    run(room, attempt)
    assert room.streamed(attempt) == ["1-1", "1-2", "1-3", "1-4", "1-5", "1-6"]


def test_a_flood_of_output_is_capped(room: Room) -> None:
    attempt = room.job("steps=3 flood=48")
    run(room, attempt)
    sizes = [path.stat().st_size for path in attempt.path.glob("engine.log*")]
    assert sum(sizes) < 24 * 2**20
    assert b"log shortened" in attempt.log_path.read_bytes()


def test_a_log_that_cannot_be_shortened_stops_nothing(room: Room) -> None:
    attempt = room.job("steps=3 flood=20")
    (attempt.path / "engine.log.1").mkdir(parents=True)
    outcome = run(room, attempt)
    assert outcome is not None
    assert outcome.status == "succeeded"


def test_a_command_that_cannot_be_handed_over_is_tried_again(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=1000")
    obstacle = attempt.path / "commands.jsonl"

    def steer() -> None:
        wait_for(lambda: room.steps(attempt), "a step")
        obstacle.mkdir()
        room.live.put_command(attempt.job_id, Command(number=1, type="set", beta=0.1))
        before = len(room.steps(attempt))
        wait_for(lambda: len(room.steps(attempt)) > before + 10, "ten more steps")
        obstacle.rmdir()
        wait_for(lambda: any(event.type == "control.applied" for event in room.events(attempt)), "the answer")
        room.live.set_wanted(attempt.job_id, 1, "cancel")

    meanwhile(steer)
    run(room, attempt)


def test_garbage_in_redis_stops_nothing(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=40 step_s=0.02")

    def spoil() -> None:
        wait_for(lambda: room.steps(attempt), "a step")
        client = room.live._redis
        client.hset(f"grpo:job:{attempt.job_id}:commands", "1", "not a command")
        client.set(f"grpo:job:{attempt.job_id}:wanted", "[]")

    meanwhile(spoil)
    outcome = run(room, attempt)
    assert outcome is not None
    assert outcome.status == "succeeded"


def test_training_goes_on_while_redis_is_dead_and_the_stream_is_whole_after(fragile_room: Room, meanwhile: Meanwhile) -> None:
    room = fragile_room
    attempt = room.job("steps=60 step_s=0.03")

    def restart() -> None:
        wait_for(lambda: len(room.steps(attempt)) >= 5, "five steps")
        room.valkey.kill()
        during = len(room.steps(attempt))
        wait_for(lambda: len(room.steps(attempt)) >= during + 10, "ten steps without Redis")
        room.valkey.start()

    meanwhile(restart)
    outcome = run(room, attempt)
    assert outcome is not None
    assert outcome.status == "succeeded"
    assert room.streamed(attempt)[-1] == "1-62"
    assert room.streamed(attempt) == [event.stream_id for event in room.events(attempt)]


def test_the_lease_is_held_while_the_engine_runs_and_given_back_after(room: Room, meanwhile: Meanwhile) -> None:
    attempt = room.job("steps=1000")

    def look() -> None:
        lease = wait_for(lambda: room.live.lease(attempt.job_id), "the lease")
        assert (lease.worker, lease.epoch) == ("worker-under-test", 1)
        room.live.set_wanted(attempt.job_id, 1, "cancel")

    meanwhile(look)
    run(room, attempt)
    assert room.live.lease(attempt.job_id) is None


def test_a_worker_that_cannot_start_an_engine_says_so_in_the_verdict(room: Room) -> None:
    attempt = room.job()
    outcome = carry_out(attempt.job_id, 1, room.live, room.settings, "w", ("/does/not/exist",))
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("failed", "crash")
    assert "No such file" in attempt.log_path.read_text()
    assert psutil.pid_exists(1)
