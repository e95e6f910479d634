"""The attempt directory as the worker sees it: claim, what the engine is told, who runs it, how it ended.

An attempt writes only here. The claim file decides who runs; `outcome.json` is the verdict the dispatcher settles by.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from grpo_engine.contract.command import Command, Dispatch
from grpo_engine.contract.event import WORKER_LOST, Outcome
from jobs.artifacts import LEDGER_CLAIM, Artifacts, write_atomic
from worker.processes import Identity, identify


class Attempt:
    """`attempts/<epoch>` of one job."""

    def __init__(self, artifacts: Artifacts, job_id: str, epoch: int) -> None:
        self._artifacts = artifacts
        self.job_id = job_id
        self.epoch = epoch
        self.path = artifacts.attempt_dir(job_id, epoch)
        self.events_path = artifacts.events_path(job_id, epoch)
        self.log_path = artifacts.log_path(job_id, epoch)

    def __str__(self) -> str:
        return f"{self.job_id} attempt {self.epoch}"

    @property
    def is_claimed(self) -> bool:
        """Whether somebody runs, ran or withdrew this attempt."""
        return self._artifacts.claim_holder(self.job_id, self.epoch) is not None

    @property
    def is_withdrawn(self) -> bool:
        """Whether the server took the attempt back before a worker had it."""
        holder = self._artifacts.claim_holder(self.job_id, self.epoch)
        return holder is not None and holder.get("worker_id") == LEDGER_CLAIM

    @property
    def is_given_up(self) -> bool:
        """Whether the dispatcher took this worker for dead. The disk says so, also where Redis cannot be reached."""
        outcome = self.outcome()
        return outcome is not None and outcome.reason == WORKER_LOST

    def claim(self, worker_id: str) -> bool:
        """Take the attempt for this process; False when somebody has it already."""
        if not self._artifacts.claim(self.job_id, self.epoch, worker_id):
            return False
        self.write_run(engine=None)
        return True

    def write_run(self, engine: Identity | None) -> None:
        """Note who supervises and which process is the engine, for the janitor."""
        supervisor = identify(os.getpid())
        assert supervisor is not None, "a process that runs has a start time"
        content: dict[str, Any] = {"job_id": self.job_id, "epoch": self.epoch, "supervisor": supervisor.to_dict()}
        if engine is not None:
            content |= {**engine.to_dict(), "pgid": engine.pid}
        write_atomic(self.path / "run.json", json.dumps(content).encode())

    def supervisor(self) -> Identity | None:
        """The process that watches or watched over the attempt; None when it is unknown."""
        return Identity.from_dict(self._run().get("supervisor", {}))

    def engine(self) -> Identity | None:
        """The engine process; None when none was started."""
        return Identity.from_dict(self._run())

    def _run(self) -> dict[str, Any]:
        try:
            content = json.loads((self.path / "run.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write_dispatch(self, dispatch: Dispatch) -> None:
        """What the engine reads first."""
        write_atomic(self.path / "dispatch.json", dispatch.model_dump_json().encode())

    def append_command(self, command: Command) -> None:
        """Hand one command to the engine; it looks at each step boundary. Raises OSError and leaves no half line then."""
        with (self.path / "commands.jsonl").open("ab", buffering=0) as file:
            before = file.tell()
            try:
                line = command.model_dump_json().encode() + b"\n"
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "the disk took only a part of the command")
            except OSError:
                file.truncate(before)
                raise

    def outcome(self) -> Outcome | None:
        """The verdict; None while there is none."""
        return self._artifacts.outcome(self.job_id, self.epoch)

    def settle(self, outcome: Outcome) -> Outcome:
        """Write the verdict unless there is one; returns the one that stands. The engine must have ended."""
        self._artifacts.write_outcome(self.job_id, self.epoch, outcome)
        standing = self.outcome()
        assert standing is not None, "a verdict was written"
        return standing
