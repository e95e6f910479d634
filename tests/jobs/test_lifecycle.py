"""The life of a job under any sequence of requests and endings, checked against the table of legal transitions."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grpo_engine.contract.error import Conflict
from grpo_engine.contract.event import Outcome
from jobs.ledger import Ledger, Lost, Void, open_ledger
from jobs.lifecycle import ACTIVITY_PHASES, FACES, TRANSITIONS, State, Wanted, phase_of, states_of_status, status_of
from jobs.settings import Settings
from tests.jobs.makers import FakeAttempt, make_job


def outcome(status: str, reason: str, *, retryable: bool = False) -> Outcome:
    return Outcome(status=status, reason=reason, message=reason, retryable=retryable, last_step=0)  # type: ignore[arg-type]


def test_the_tables_cover_every_state() -> None:
    assert set(TRANSITIONS) == set(FACES) == set(State)
    for state in State:
        assert state.is_terminal == (not TRANSITIONS[state])
        assert state in states_of_status(status_of(state))
    assert states_of_status("running") == {State.RUNNING, State.STOPPING}
    assert states_of_status("nonsense") == frozenset()
    assert phase_of(State.STOPPING, Wanted.CANCEL, "") == "cancelling"
    assert phase_of(State.STOPPING, Wanted.PAUSE, "") == "pausing"
    assert phase_of(State.RUNNING, Wanted.RUN, "") == "provisioning"
    assert {phase_of(State.RUNNING, Wanted.RUN, kind) for kind in ACTIVITY_PHASES} >= {"provisioning", "training", "publishing"}


class JobLife(RuleBasedStateMachine):
    """One job, driven at random by people, workers and bad luck."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        settings = Settings(data_dir=Path(self.directory.name), max_crashes=2, max_worker_losses=2, max_stuck_attempts=3).resolved()
        self.ledger: Ledger = open_ledger(settings)
        self.path: list[State] = []
        self.terminal: State | None = None

    @initialize()
    def create(self) -> None:
        self.job_id = make_job(self.ledger).id
        self.path = [State.QUEUED]

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()

    @property
    def state(self) -> State:
        return self.ledger.get_job(self.job_id).state

    @property
    def epoch(self) -> int:
        return self.ledger.get_job(self.job_id).epoch

    def look(self) -> None:
        if self.state is not self.path[-1]:
            self.path.append(self.state)

    @rule()
    def cancel(self) -> None:
        before = self.state
        try:
            after = self.ledger.request(self.job_id, "cancel").state
            assert after in (State.CANCELLED, State.STOPPING)
        except Conflict:
            assert before in (State.SUCCEEDED, State.FAILED)
        self.look()

    @rule()
    def pause(self) -> None:
        before = self.ledger.get_job(self.job_id)
        try:
            assert self.ledger.request(self.job_id, "pause").state in (State.PAUSED, State.STOPPING)
        except Conflict:
            assert before.is_terminal or before.wanted is Wanted.CANCEL
        self.look()

    @rule()
    def resume(self) -> None:
        before = self.ledger.get_job(self.job_id)
        try:
            after = self.ledger.request(self.job_id, "resume")
            assert after.state is not State.PAUSED
        except Conflict:
            assert before.is_terminal or before.wanted is Wanted.CANCEL
        self.look()

    @rule()
    def dispatch(self) -> None:
        before, epoch = self.state, self.epoch
        assert (self.ledger.dispatch(self.job_id, from_epoch=epoch) is not None) == (before is State.QUEUED)
        assert self.ledger.dispatch(self.job_id, from_epoch=epoch + 7) is None
        self.look()

    @precondition(lambda self: self.epoch > 0)
    @rule()
    def claim(self) -> None:
        FakeAttempt(self.ledger.artifacts, self.job_id, self.epoch).claim()
        self.ledger.mark_running(self.job_id, self.epoch, "w")
        self.look()

    @precondition(lambda self: self.epoch > 0)
    @rule()
    def step(self) -> None:
        """A little progress, so that attempts do not look stuck."""
        seq = self.ledger.last_ingested(self.job_id)[1]
        attempt = FakeAttempt(self.ledger.artifacts, self.job_id, self.epoch)
        attempt.seq = seq
        self.ledger.ingest(self.job_id, [attempt.step(self.ledger.get_job(self.job_id).step + 1)])

    def settle(self, ending: Outcome | Lost | Void) -> None:
        before = self.state
        if isinstance(ending, Void) and before is not State.DISPATCHED:
            return
        settled = self.ledger.settle(self.job_id, self.epoch, ending)
        assert (settled is not None) == before.has_attempt
        assert self.ledger.settle(self.job_id, self.epoch + 1, ending) is None, "an epoch that is not current has no say"
        if settled is not None:
            assert not settled.state.has_attempt
            if before is State.DISPATCHED and not isinstance(ending, Void):
                self.path.append(State.RUNNING)
        self.look()

    @rule()
    def succeed(self) -> None:
        self.settle(outcome("succeeded", "completed"))

    @rule()
    def stop(self) -> None:
        self.settle(outcome("stopped", "drain", retryable=True))

    @rule()
    def crash(self) -> None:
        self.settle(outcome("failed", "crash", retryable=True))

    @rule()
    def refuse(self) -> None:
        self.settle(outcome("failed", "config_error"))

    @rule()
    def lose(self) -> None:
        self.settle(Lost("gone"))

    @rule()
    def withdraw(self) -> None:
        self.settle(Void("withdrawn"))

    @invariant()
    def every_move_is_legal(self) -> None:
        for before, after in zip(self.path, self.path[1:], strict=False):
            assert after in TRANSITIONS[before], self.path

    @invariant()
    def history_tells_every_move(self) -> None:
        if not self.path:
            return
        moves = [event for event in self.ledger.events(self.job_id, limit=10_000).data if event.data.get("to")]
        assert [State.QUEUED, *(State(event.data["to"]) for event in moves)] == self.path
        assert [State(event.data["from"]) for event in moves] == self.path[:-1]

    @invariant()
    def terminal_is_final(self) -> None:
        if not self.path:
            return
        if self.terminal is None and self.state.is_terminal:
            self.terminal = self.state
        assert self.terminal in (None, self.state)
        job = self.ledger.get_job(self.job_id)
        assert (job.finished_at is not None) == job.is_terminal
        assert (job.error is not None) == (job.state is State.FAILED)
        assert job.crashes <= 3
        assert job.worker_losses <= 3


JobLife.TestCase.settings = hypothesis_settings(max_examples=10, stateful_step_count=25, deadline=None)
TestJobLife = JobLife.TestCase


# Budgets


@pytest.fixture
def patient(ledger: Ledger) -> Ledger:
    ledger.budgets = dataclasses.replace(ledger.budgets, max_crashes=3, max_worker_losses=10, max_stuck_attempts=3)
    return ledger


def run_attempt(ledger: Ledger, job_id: str, ending: Outcome | Lost, *, steps: int) -> State:
    """One attempt that completes `steps` new steps."""
    job = ledger.get_job(job_id)
    dispatched = ledger.dispatch(job_id, from_epoch=job.epoch)
    assert dispatched is not None
    attempt = FakeAttempt(ledger.artifacts, job_id, dispatched.epoch)
    attempt.claim()
    ledger.ingest(job_id, [attempt.step(job.step + 1 + index) for index in range(steps)])
    settled = ledger.settle(job_id, dispatched.epoch, ending)
    assert settled is not None
    return settled.state


def test_a_job_survives_three_crashes_with_progress_and_not_the_fourth(patient: Ledger) -> None:
    job = make_job(patient)
    crash = outcome("failed", "out_of_memory", retryable=True)
    assert [run_attempt(patient, job.id, crash, steps=1) for _ in range(4)] == [State.QUEUED] * 3 + [State.FAILED]
    failed = patient.get_job(job.id)
    assert failed.error is not None
    assert (failed.error.code, failed.crashes) == ("out_of_memory", 4)


def test_a_job_that_dies_three_times_at_the_same_step_is_poison(patient: Ledger) -> None:
    job = make_job(patient)
    crash = outcome("failed", "crash", retryable=True)
    states = [run_attempt(patient, job.id, crash, steps=2), *(run_attempt(patient, job.id, crash, steps=0) for _ in range(2))]
    assert states == [State.QUEUED, State.QUEUED, State.FAILED]
    failed = patient.get_job(job.id)
    assert failed.error is not None
    assert failed.error.code == "poison"
    assert "after step 2" in failed.error.message


def test_lost_workers_have_a_budget_of_their_own(patient: Ledger) -> None:
    job = make_job(patient)
    assert [run_attempt(patient, job.id, Lost("gone"), steps=1) for _ in range(11)] == [State.QUEUED] * 10 + [State.FAILED]
    assert patient.get_job(job.id).crashes == 0


def test_preemptions_cost_nothing(patient: Ledger) -> None:
    job = make_job(patient)
    drain = outcome("stopped", "drain", retryable=True)
    assert {run_attempt(patient, job.id, drain, steps=0) for _ in range(20)} == {State.QUEUED}
    assert patient.get_job(job.id).preemptions == 20


def test_crashes_wait_longer_each_time(patient: Ledger) -> None:
    patient.clock = lambda: 1000.0
    patient.budgets = dataclasses.replace(patient.budgets, retry_backoff_s=2.0)
    job = make_job(patient)
    waits = []
    for _ in range(3):
        run_attempt(patient, job.id, outcome("failed", "crash", retryable=True), steps=1)
        waits.append(patient.get_job(job.id).not_before - 1000.0)
    assert waits == [2.0, 4.0, 8.0]


def test_what_cannot_be_retried_fails_at_once_and_names_the_field(patient: Ledger) -> None:
    job = make_job(patient)
    refused = Outcome(status="failed", reason="config_error", message="no such model", retryable=False, last_step=0, param="model")
    assert run_attempt(patient, job.id, refused, steps=0) is State.FAILED
    error = patient.get_job(job.id).error
    assert error is not None
    assert (error.code, error.message, error.param) == ("config_error", "no such model", "model")
