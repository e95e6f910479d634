"""When memory runs out: once with half as much in a forward, then an end that says how much and what to change.

The result of a step does not depend on how it is split into micro-batches, nor the completions on how many are sampled at once
(up to rounding), so a smaller split is a way on. It is tried once in a run for each of the two and kept from then on, also by an
attempt that resumes: an exact continuation must compute the same way. Not here: a process that the kernel kills without an
error. Torch-free.
"""

from __future__ import annotations

import gc
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from grpo_engine.outcome import RunFailure

SETTINGS = (
    "lower method.grpo.resources.micro_batch_tokens, method.grpo.sampling.max_completion_tokens, group_size or prompts_per_step, "
    "set method.grpo.resources.activation_checkpointing, or train an adapter (method.grpo.adapter)"
)

_BYTES = re.compile(r"(?:tried to allocate|allocate) (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

Result = TypeVar("Result")


class OutOfMemory(RunFailure):
    """Memory ran out, and a smaller split did not help or could not."""

    reason = "out_of_memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, a GPU's, or torch's CPU allocator (a RuntimeError that says so)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ("not enough memory", "can't allocate memory"))


def requested_bytes(error: BaseException) -> int | None:
    """What the allocator was asked for in vain, when the error says it."""
    found = _BYTES.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2].lower()])


def peak_bytes() -> int:
    """The most main memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe(error: BaseException, where: str = "") -> str:
    """One sentence: how many bytes were asked for, how many the process held at most, and which settings need less."""
    wanted = requested_bytes(error)
    asked = "memory" if wanted is None else f"{wanted:,} bytes"
    return f"out of memory{where}: {asked} could not be had (the process held at most {peak_bytes():,} bytes); {SETTINGS}"


@dataclass
class Budget:
    """How much goes through one forward: `size` tokens in the reference and the update, or `size` completions in sampling."""

    size: int
    unit: str
    """How a sentence names it, such as `micro-batches of {:,} tokens`."""
    param: str
    """The setting that governs it."""
    was_halved: bool = False
    news: str | None = None
    """What is to be said about it, once."""
    is_short: Callable[[bool], bool] = bool
    """From whether memory ran out in this process to whether it did in any process of the job: all of them halve together."""
    is_final: bool = False
    """Whether the first shortage is the end: where every forward is an act of all processes, the others wait in the middle of it."""

    def fit(self, work: Callable[[], Result], where: str, clean_up: Callable[[], None] = lambda: None) -> Result:
        """Do the work; when memory runs out, halve the budget, clean up and do it again, once in a run.

        `work` must read `size` anew and begin from the start. Raises OutOfMemory when it runs out again.
        """
        while True:
            result: Result | None = None
            trouble = ""
            try:
                result = work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                trouble = describe(error, f" in {where}")
                if self.was_halved or self.is_final or self.size < 2:
                    raise self._refusal(error, where) from error
            if self.is_final or not self.is_short(bool(trouble)):
                return cast(Result, result)
            self._halve(trouble or f"out of memory in {where} of another rank")
            result = None
            clean_up()  # outside the handler: the error's traceback holds the tensors of the failed forward
            gc.collect()

    def _refusal(self, error: BaseException, where: str) -> OutOfMemory:
        after = f", with {self.unit.format(self.size)}" + (", halved before" if self.was_halved else "")
        return OutOfMemory(describe(error, f" in {where}{after}"), param=self.param)

    def _halve(self, trouble: str) -> None:
        self.news = f"{trouble}; going on with {self.unit.format(self.size // 2)} instead of {self.size:,}"
        self.size //= 2
        self.was_halved = True

    def take_news(self) -> str | None:
        """What is to be said, and nothing more afterwards."""
        news, self.news = self.news, None
        return news

    def state(self) -> dict[str, int | bool]:
        """For a resume state."""
        return {"size": self.size, "was_halved": self.was_halved}

    def load(self, state: dict[str, int | bool]) -> None:
        """Take over a halving of an earlier attempt. One of this attempt is never undone, also not by a rollback."""
        if state["was_halved"]:
            self.size, self.was_halved = int(state["size"]), True


def token_budget(tokens: int, is_short: Callable[[bool], bool] = bool) -> Budget:
    """For the reference's and the update's forwards."""
    return Budget(tokens, "micro-batches of {:,} tokens", "method.grpo.resources.micro_batch_tokens", is_short=is_short)


def sampling_budget(completions: int, is_short: Callable[[bool], bool] = bool) -> Budget:
    """For the completions one process samples at once."""
    return Budget(completions, "{:,} completions sampled at once", "method.grpo.sampling.group_size", is_short=is_short)
