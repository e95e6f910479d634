"""What the engine is told: the dispatch that starts an attempt, and numbered commands while it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import NonNegativeFloat, PositiveFloat, PositiveInt, Strict
from grpo_engine.contract.grader import RemotePolicy
from grpo_engine.contract.job import JobSpec


class Hosts(Strict):
    """Where the ranks of a job meet when they run on several hosts, which share the attempt directory."""

    count: Annotated[int, Field(ge=2, le=256)]
    """Hosts; each runs as many ranks. The first is the one the worker's engine runs on."""
    address: Annotated[str, Field(pattern=r"^\[?[A-Za-z0-9._:-]+\]?:[1-9][0-9]{0,4}$")]
    """`host:port` at which the first rank listens for the others."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]
    """Network interface, or address of it, over which the ranks talk on the CPU; each host may be told another one."""


class Dispatch(Strict):
    """`dispatch.json` in the attempt directory: everything the engine needs. Paths are absolute or relative to it."""

    job_id: str = "local"
    epoch: PositiveInt = 1
    spec: JobSpec
    training_file: str | None = None
    validation_file: str | None = None
    resume_from: str | None = None
    """Checkpoint directory to continue from; null starts at step 1."""
    model_from: str | None = None
    """Weights directory of the model when the spec names a checkpoint; null = the spec's model."""
    reference_from: str | None = None
    """Weights directory of the reference when it is not the initial model."""
    cache_dir: str | None = None
    """Where converted models are kept; null = the user's cache."""
    model_dir: str | None = None
    """Folder below which local models may be named; null = any local folder."""
    remote_graders: RemotePolicy | None = None
    """What remote graders may do; null = none may be called."""
    hosts: Hosts | None = None
    """For a job of several ranks; null = all of them run on this host."""


class Command(Strict):
    """A numbered instruction, applied at a step boundary and answered by `control.applied` or `control.refused`."""

    number: PositiveInt
    type: Literal["set", "checkpoint", "pause", "drain"]
    """`pause` and `drain` finish the step, checkpoint and end with outcome `stopped`."""
    beta: NonNegativeFloat | None = None
    target: PositiveFloat | None = None
    learning_rate: PositiveFloat | None = None
    actor: Annotated[str, Field(max_length=128)] = "operator"

    @model_validator(mode="after")
    def _set_has_values(self) -> Command:
        values = (self.beta, self.target, self.learning_rate)
        if (self.type == "set") != any(value is not None for value in values):
            raise ValueError("set needs at least one of beta, target, learning_rate; other commands take none")
        return self
