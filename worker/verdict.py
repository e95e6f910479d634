"""The verdict on an engine that left none: killed, crashed, or out of memory."""

from __future__ import annotations

import signal
from pathlib import Path

from grpo_engine.contract.event import EXIT_CONFIG, EXIT_DIVERGED, Outcome, Progress, signal_name

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def oom_kills() -> int:
    """How often the kernel has killed for memory, in this container and on this host; 0 where it does not say."""
    total = 0
    for path in _COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return total


def verdict_on_exit(returncode: int, progress: Progress, *, was_oom: bool) -> Outcome:
    """The outcome of an engine that ended by itself without writing one."""
    if returncode < 0:
        name = signal_name(-returncode)
        if was_oom and -returncode == signal.SIGKILL:
            return _failed("out_of_memory", f"the kernel killed the engine for memory ({name})", progress)
        return _failed("crash", f"the engine was ended by {name}", progress)
    if returncode == EXIT_CONFIG:
        return _failed("config_error", "the engine refused the job; engine.log says why", progress, retryable=False)
    if returncode == EXIT_DIVERGED:
        return _failed("nonfinite", "training diverged; engine.log says where", progress, retryable=False)
    return _failed("crash", f"the engine exited with status {returncode} and no outcome; engine.log has its last words", progress)


def stopped(reason: str, message: str, progress: Progress, *, retryable: bool) -> Outcome:
    """The outcome of an engine that was ended on purpose."""
    return Outcome(
        status="stopped",
        reason=reason,
        message=message,
        retryable=retryable,
        last_step=progress.last_step,
        resume_checkpoint=progress.resume_checkpoint,
    )


def worker_lost(progress: Progress) -> Outcome:
    """The outcome of an attempt whose supervising process died."""
    return _failed("worker_lost", "the worker process that ran this attempt died", progress)


def supervision_failed(error: BaseException, progress: Progress) -> Outcome:
    """The outcome of an attempt the worker could not carry out, or was ended in the middle of."""
    if isinstance(error, SystemExit):
        return stopped("drain", "the worker was ended before the step was; the last checkpoint stands", progress, retryable=True)
    return _failed("crash", f"the worker could not run the attempt: {type(error).__name__}: {error}"[:2000], progress)


def _failed(reason: str, message: str, progress: Progress, *, retryable: bool = True) -> Outcome:
    return Outcome(
        status="failed",
        reason=reason,
        message=message,
        retryable=retryable,
        last_step=progress.last_step,
        resume_checkpoint=progress.resume_checkpoint,
    )
