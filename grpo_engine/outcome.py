"""How a run ends: the verdict in `outcome.json`, the exit code beside it, and the failures that lead there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from grpo_engine.contract.event import EXIT_CONFIG, EXIT_DIVERGED, EXIT_STOPPED, EXIT_SUCCEEDED, Outcome

OUTCOME_FILE = "outcome.json"
EXIT_CRASH = 1


class RunFailure(Exception):
    """The run cannot go on, for a reason with a stable word of its own."""

    reason = "crash"
    is_retryable = True

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(RunFailure):
    """The spec or its data cannot be trained on; trying again will not help."""

    reason = "config_error"
    is_retryable = False


class ReferenceMismatch(ConfigError):
    """The reference weights are not the ones this run began with."""

    reason = "reference_mismatch"


class DirectoryGone(RunFailure):
    """The attempt's directory was removed: nobody can follow the run, and nothing it writes would be found."""


class CheckpointDamaged(RunFailure):
    """The checkpoint to resume from does not verify; an older one may."""

    reason = "checkpoint_damaged"


class CheckpointFailed(RunFailure):
    """The last checkpoint, the run's result, could not be written."""

    reason = "checkpoint_failed"


class NonFinite(RunFailure):
    """Rewards, losses or gradients were not finite and the spec says to abort."""

    reason = "nonfinite"
    is_retryable = False


class GraderBroken(RunFailure):
    """No completion of several steps in a row could be graded."""

    reason = "grader"
    is_retryable = False


_EXIT_OF_REASON = {
    "config_error": EXIT_CONFIG,
    "reference_mismatch": EXIT_CONFIG,
    "grader": EXIT_CONFIG,
    "nonfinite": EXIT_DIVERGED,
    "guardrail": EXIT_DIVERGED,
}


def exit_code(outcome: Outcome) -> int:
    """The process's exit code for a verdict."""
    if outcome.status == "succeeded":
        return EXIT_SUCCEEDED
    if outcome.status == "stopped":
        return EXIT_STOPPED
    return _EXIT_OF_REASON.get(outcome.reason, EXIT_CRASH)


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Write `outcome.json` so that it is there whole or not at all, and survives a power cut. A directory that vanished is made anew."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / OUTCOME_FILE
    temporary = path.with_name(f".{OUTCOME_FILE}.tmp")
    text = json.dumps(outcome.model_dump(), indent=1, allow_nan=False)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_directory(run_dir)


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
