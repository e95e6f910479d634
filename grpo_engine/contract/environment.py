"""Tasks that bring prompts and grader in one, instead of a training file and a grader."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import Strict, broken_rule

MAX_ROWS = 100_000
_BESIDE = ("seed", "size")


class Environment(Strict):
    """A task of the `reasoning-gym` package: its rows are made when the job is created, and its own scorer grades."""

    type: Literal["reasoning_gym"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the task, such as `chain_sum`."""
    config: dict[str, Any] = {}
    """Settings of the task, by their names in reasoning-gym."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """What the rows are drawn from; null = the job's seed."""
    size: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 1000
    """Number of rows."""
    answer: Literal["auto", "tag", "whole"] = "auto"
    """What is graded: the last `<answer>` outside the reasoning block (`tag`; without one the score is the task's for no answer),
    the `whole` completion, or `auto`: the tag where there is one, else everything after the reasoning block."""

    @model_validator(mode="after")
    def _seed_and_size_stand_beside(self) -> Environment:
        for name in _BESIDE:
            if name in self.config:
                raise broken_rule(f"config.{name}", f"{name} stands beside config, not in it; move it to environment.{name}")
        return self
