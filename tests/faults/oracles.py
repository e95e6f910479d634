"""The six oracles: what must hold of every job after whatever was done to the server.

O1 the job has ended in a legal state. O2 the metrics hold each step once, from 1 to the last without a hole. O3 at no sampled
moment did an attempt have two engines, nor a job the engines of two attempts, unless a partition hid one. O4 where it
succeeded, weights and numbers are those of a run left alone. O5 no process of the job is left. O6 the history explains each
transition.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from jobs.ledger import JobRecord, Ledger
from jobs.lifecycle import TRANSITIONS, State
from tests.stack import wait_for
from worker.processes import engine_processes

TIMES = ("time/", "throughput/")
ENGINE_NAMES = ("grpo_engine", "scripted_engine.py")


@dataclass(frozen=True)
class Undisturbed:
    """What a run left alone gave."""

    weights: str
    """SHA-256 of the last published model.safetensors."""
    series: list[dict[str, Any]]


def readings(ledger: Ledger, job_id: str) -> list[dict[str, Any]]:
    """The job's numbers by step, without those that are times."""
    return [
        {"step": row.step, **{name: value for name, value in row.metrics.items() if not name.startswith(TIMES)}}
        for row in ledger.metrics(job_id)
    ]


def weights(ledger: Ledger, job_id: str) -> str:
    """SHA-256 of the weights the job ended with."""
    newest = max(ledger.checkpoints(job_id).data, key=lambda record: record.step)
    return next(str(file["sha256"]) for file in newest.files if file["name"] == "model.safetensors")


def undisturbed(ledger: Ledger, job_id: str) -> Undisturbed:
    """Keep what a job gave, to compare others with."""
    return Undisturbed(weights(ledger, job_id), readings(ledger, job_id))


class Oracles:
    """Watches the engines of one data directory from a thread, and judges jobs when they have ended."""

    def __init__(self, ledger: Ledger, jobs_dir: Path, every_s: float = 0.5) -> None:
        self._ledger = ledger
        self._jobs_dir = jobs_dir
        self._every_s = every_s
        self._stop = threading.Event()
        self._twins: list[str] = []
        self._overlaps: dict[str, str] = {}
        self.looks = 0
        """How often the engines were counted."""
        self._thread = threading.Thread(target=self._watch, name="oracle-3", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def judge(self, job_id: str, ends: str, like: Undisturbed | None = None, *, was_hidden: bool = False) -> JobRecord:
        """All six. `like` is compared where the job succeeded; `was_hidden`: an attempt could not be reached when the next began."""
        job = self._ledger.get_job(job_id)
        assert (job.state, job.error) == (State(ends), job.error), f"O1: {job.state}, {job.status_reason}"
        assert job.is_terminal, "O1"
        self._each_step_once(job)
        assert self.looks > 0, "O3: nobody looked"
        assert self._twins == [], "O3"
        assert was_hidden or job_id not in self._overlaps, f"O3: {self._overlaps[job_id]}"
        if like is not None and job.state is State.SUCCEEDED:
            assert readings(self._ledger, job_id) == like.series, "O4: other numbers than undisturbed"
            assert weights(self._ledger, job_id) == like.weights, "O4: other weights than undisturbed"
        wait_for(lambda: not self._left(job_id), "O5: the job's processes to be gone", 10)
        self._explained(job)
        return job

    def _each_step_once(self, job: JobRecord) -> None:
        rows = self._ledger.metrics(job.id)
        assert [row.step for row in rows] == list(range(1, job.step + 1)), "O2"
        epochs = [row.epoch for row in rows]
        assert epochs == sorted(epochs), "O2: a step of a fenced attempt counts"
        whole = self._ledger.integrity(job.id)
        assert (whole.missing, whole.gaps, whole.steps) == ([], 0, job.step), "O2"
        if job.state is State.SUCCEEDED:
            assert job.step == job.num_steps, "O2"

    def _explained(self, job: JobRecord) -> None:
        story = [event for event in self._ledger.events(job.id, limit=100_000).data if event.type.startswith("job.")]
        assert story[0].type == "job.created", "O6"
        moves = [(State(event.data["from"]), State(event.data["to"]), event) for event in story if "to" in event.data]
        at = State.QUEUED
        for before, after, event in moves:
            assert before is at, f"O6: {event.type} from {before}, and the job was {at}"
            assert after in TRANSITIONS[before], f"O6: {before} to {after}"
            assert event.message, "O6: a transition without a reason"
            at = after
        assert at is job.state, "O6: the last transition does not lead to the job's state"
        assert sum(after is State.DISPATCHED for _, after, _ in moves) == job.epoch, "O6: attempts without a dispatch"

    def _left(self, job_id: str) -> list[int]:
        return [process.pid for process, badge in engine_processes() if badge.job_id == job_id]

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            count = Counter(
                (badge.job_id, badge.epoch)
                for process, badge in engine_processes()
                if Path(badge.run_dir).is_relative_to(self._jobs_dir) and is_engine(process)
            )
            self.looks += 1
            for job_id, number in Counter(job_id for job_id, _ in count).items():
                if number > 1:
                    self._overlaps[job_id] = f"engines of attempts {sorted(epoch for one, epoch in count if one == job_id)} at once"
            self._twins += [f"{job_id} attempt {epoch}: {number} engines" for (job_id, epoch), number in count.items() if number > 1]


def is_engine(process: psutil.Process) -> bool:
    """Whether a process is the engine itself and none of its helpers."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(Path(word).name in ENGINE_NAMES for word in words)
