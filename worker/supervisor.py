"""Watch one engine from start to verdict.

Each turn carries events up, commands down, renews the lease and looks at what is wanted. Redis being away changes
nothing for the engine. Ways to end early, strongest first:

- superseded: a newer attempt exists, or this one was given up as lost; Redis or the disk says so. The engine is stopped
  and nothing more is published.
- cancel: SIGTERM, SIGKILL after `cancel_grace_s`, and no process of the attempt is left.
- drain (the worker leaves): a command; the engine finishes its step, saves and ends. SIGTERM after `drain_grace_s`.
- pause: the same command path, with no limit: a step takes as long as it takes.
"""

from __future__ import annotations

import enum
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_engine.contract.command import Command
from grpo_engine.contract.event import Outcome
from jobs.live import SUPERVISOR_COMMANDS
from worker.attempt import Attempt
from worker.drain import DrainFlag
from worker.engine import ENGINE_COMMAND, Engine
from worker.processes import SURVIVED_S, CannotEnd
from worker.spans import AttemptSpans
from worker.tail import Tail
from worker.verdict import oom_kills, stopped, verdict_on_exit
from worker.wire import Wire

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""How long the end of an attempt waits for a Redis that is away or slow, before leaving the rest to the dispatcher."""


class Stop(enum.IntEnum):
    """Why the engine is asked to end; a stronger reason replaces a weaker one."""

    NONE = 0
    PAUSE = 1
    DRAIN = 2
    CANCEL = 3
    SUPERSEDED = 4


@dataclass(frozen=True)
class Timing:
    """Seconds that govern supervision."""

    poll_s: float
    heartbeat_s: float
    cancel_grace_s: float
    drain_grace_s: float


class Supervisor:
    """Runs one claimed attempt in this process, from its main thread."""

    def __init__(
        self,
        attempt: Attempt,
        wire: Wire,
        timing: Timing,
        drain: DrainFlag,
        *,
        environment: Mapping[str, str],
        command: Sequence[str] = ENGINE_COMMAND,
        spans: AttemptSpans | None = None,
    ) -> None:
        self._attempt = attempt
        self._wire = wire
        self._timing = timing
        self._drain = drain
        self._environment = environment
        self._command = command
        self._tail = Tail(attempt, None if spans is None else spans.take)
        self._stop = Stop.NONE
        self._stop_since = 0.0
        self._last_signal: signal.Signals | None = None
        self._sent: set[int] = set()
        self._own_number = SUPERVISOR_COMMANDS + 2 * attempt.epoch
        """Unique over attempts: the engine remembers in its checkpoint which numbers it has applied."""
        self._next_heartbeat = 0.0

    def run(self) -> Outcome:
        """Start the engine, watch it, and return the verdict that lies in outcome.json."""
        kills_before = oom_kills()
        engine = Engine(self._attempt, self._environment, self._command)
        try:
            while not engine.wait(self._timing.poll_s):
                self._turn(engine)
        finally:
            engine.end(self._timing.cancel_grace_s)
        returncode = engine.returncode
        assert returncode is not None, "an engine that was ended has an exit status"
        self._tail.read()
        outcome = self._attempt.outcome() or self._attempt.settle(self._verdict(returncode, was_oom=oom_kills() > kills_before))
        if self._stop is not Stop.SUPERSEDED:
            self._last_words()
        log.info("%s: %s (%s): %s", self._attempt, outcome.status, outcome.reason, outcome.message)
        return outcome

    def _turn(self, engine: Engine) -> None:
        self._tail.read()
        self._look_at_wanted()
        if self._stop is not Stop.SUPERSEDED:
            self._tail.publish(self._wire, self._timing.heartbeat_s)
            if time.monotonic() >= self._next_heartbeat:
                self._wire.renew_lease()
                self._next_heartbeat = time.monotonic() + self._timing.heartbeat_s
        if self._stop < Stop.CANCEL:
            self._pass_commands()
        self._press(engine)
        engine.cap_log()

    def _look_at_wanted(self) -> None:
        if self._drain.is_set():
            self._ask(Stop.DRAIN)
        wanted = self._wire.wanted()
        if self._wire.is_fenced or self._attempt.is_given_up:
            self._ask(Stop.SUPERSEDED)
        elif wanted is None:
            return
        elif wanted.wanted == "cancel":
            self._ask(Stop.CANCEL)
        elif wanted.wanted == "requeue":
            self._ask(Stop.DRAIN)
        elif wanted.wanted == "pause":
            self._ask(Stop.PAUSE)

    def _ask(self, stop: Stop) -> None:
        if stop <= self._stop:
            return
        log.info("%s: asked to stop (%s)", self._attempt, stop.name.lower())
        self._stop = stop
        self._stop_since = time.monotonic()

    def _pass_commands(self) -> None:
        if self._stop is Stop.PAUSE:
            self._send(Command(number=self._own_number, type="pause", actor="server"))
        elif self._stop is Stop.DRAIN:
            self._send(Command(number=self._own_number + 1, type="drain", actor="server"))
        for command in self._wire.commands():
            if command.number not in self._tail.answered:
                self._send(command)

    def _send(self, command: Command) -> None:
        if command.number in self._sent:
            return
        try:
            self._attempt.append_command(command)
        except OSError as error:
            log.warning("%s: command %s cannot be handed over yet: %s", self._attempt, command.number, error)
        else:
            self._sent.add(command.number)

    def _press(self, engine: Engine) -> None:
        """Escalate by time: nothing, SIGTERM, SIGKILL. Raises CannotEnd when that has not helped for `SURVIVED_S`."""
        if self._stop < Stop.DRAIN:
            return
        patience = self._timing.drain_grace_s if self._stop is Stop.DRAIN else 0.0
        waited = time.monotonic() - self._stop_since - patience
        if waited >= self._timing.cancel_grace_s + SURVIVED_S:
            raise CannotEnd(f"the engine of {self._attempt} has survived SIGKILL for {SURVIVED_S:g} s")
        if waited >= self._timing.cancel_grace_s:
            engine.signal(signal.SIGKILL)
        elif waited >= 0 and self._last_signal is None:
            self._last_signal = signal.SIGTERM
            engine.signal(signal.SIGTERM)

    def _verdict(self, returncode: int, *, was_oom: bool) -> Outcome:
        progress = self._tail.progress
        if self._stop is Stop.CANCEL:
            return stopped("cancel", "cancelled", progress, retryable=False)
        if self._stop is Stop.SUPERSEDED:
            return stopped("superseded", "a newer attempt took over", progress, retryable=False)
        if self._drain.is_set() and returncode in (-signal.SIGTERM, -signal.SIGKILL):
            return stopped("drain", "the worker left before the step ended; the last checkpoint stands", progress, retryable=True)
        return verdict_on_exit(returncode, progress, was_oom=was_oom)

    def _last_words(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        while not self._tail.publish(self._wire, LAST_WORDS_S) and not self._wire.is_fenced and time.monotonic() < deadline:
            time.sleep(self._timing.poll_s)
