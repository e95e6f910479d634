"""A few grader processes shared by everyone who grades, each sample under a deadline.

One thread drives one process. Callers take turns, one sample each, so a caller with many slow samples delays nobody for longer
than one sample. A process that passes the deadline or dies is replaced; its sample gets a fault.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from grpo_engine.grader.process import DeadlinePassed, GraderProcess, ProcessDied
from grpo_engine.grader.sample import Sample, Score
from grpo_engine.grader.wire import compile_line, request_line, score_from_wire

DEFAULT_DEADLINE_S = 10.0
DEFAULT_SIZE = 2


@dataclass(eq=False)
class _Call:
    """The samples of one caller that still wait."""

    grader: str
    config: str
    deadline_s: float
    waiting: deque[tuple[Sample, Future[Score]]] = field(default_factory=deque)


class ProcessPool:
    """Grader processes, started when first needed. `close()` ends them; so does the end of this process."""

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self._size = size
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._processes: dict[int, GraderProcess] = {}
        self.num_replaced = 0
        """Processes killed for a hung sample or found dead."""

    @property
    def pids(self) -> list[int]:
        """The processes that live now."""
        return [process.pid for process in list(self._processes.values())]

    def grade(self, grader: str, config: str, samples: Sequence[Sample], deadline_s: float) -> list[Score]:
        """Score samples in order. `grader` names `config` (JSON text of the grader) uniquely. Blocks until all have an answer."""
        call = _Call(grader, config, deadline_s, deque((sample, Future()) for sample in samples))
        futures = [future for _, future in call.waiting]
        if not futures:
            return []
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the grader pool is closed")
            self._calls.append(call)
            self._start_threads(len(futures))
            self._changed.notify_all()
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the processes. Samples that still wait get a fault. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for process in list(self._processes.values()):
            process.terminate()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start_threads(self, num_samples: int) -> None:
        wanted = min(self._size, len(self._threads) + num_samples)
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._drive, args=(len(self._threads),), name="grader-pool", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> tuple[_Call, Sample, Future[Score]] | None:
        """The next sample, callers in turn; None when the pool is closed."""
        with self._changed:
            while not self._calls and not self._is_closed:
                self._changed.wait()
            if not self._calls:
                return None
            call = self._calls.popleft()
            sample, future = call.waiting.popleft()
            if call.waiting:
                self._calls.append(call)
            return call, sample, future

    def _drive(self, slot: int) -> None:
        """One thread's life: take a sample, have it graded, answer its future."""
        while (task := self._next()) is not None:
            call, sample, future = task
            try:
                future.set_result(self._grade_one(slot, call, sample))
            except Exception as error:  # noqa: BLE001 - the caller must get an answer or the error, never wait for ever
                future.set_exception(error)
        process = self._processes.pop(slot, None)
        if process is not None:
            process.kill()

    def _grade_one(self, slot: int, call: _Call, sample: Sample) -> Score:
        if self._is_closed:
            return Score(math.nan, error="the grader pool was closed", kind="crashed")
        try:
            process = self._processes.get(slot)
            if process is None:
                process = self._processes[slot] = GraderProcess()
            if call.grader not in process.compiled:
                process.ask(compile_line(call.grader, call.config), max(call.deadline_s, 60.0))
                process.compiled.add(call.grader)
            return score_from_wire(process.ask(request_line(call.grader, sample), call.deadline_s))
        except DeadlinePassed:
            self._drop(slot)
            return Score(math.nan, error=f"the grader gave no answer within {call.deadline_s:g} s and was ended", kind="timeout")
        except (ProcessDied, OSError) as death:
            self._drop(slot)
            return Score(math.nan, error=str(death), kind="crashed")

    def _drop(self, slot: int) -> None:
        self._processes.pop(slot, None)
        self.num_replaced += 1
