"""Where a job runs: devices, processes, precision, memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import PositiveInt, Strict, broken_rule


class Resources(Strict):
    """Where the job runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs the job needs; with 2 and more, one process trains on each and the groups of a step are divided among them."""
    cpu_ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes on the CPU that divide the groups of a step among them, as several GPUs would. Not together with `gpus`."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: `ddp` holds all weights in each; `fsdp` divides weights, gradients and optimizer state (all weights are
    gathered for sampling, in the compute dtype)."""
    rank_timeout_s: Annotated[int, Field(ge=5, le=86_400)] = 1800
    """How long the processes of a job wait for one another (grading included) before the attempt ends as failed."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`bf16` computes in bf16 beside fp32 master weights; `auto` takes it where the processor has it."""
    micro_batch_tokens: PositiveInt = 16384
    """Token budget of one forward in the update; the result does not depend on it."""
    activation_checkpointing: bool = False

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return max(self.gpus, self.cpu_ranks)

    @model_validator(mode="after")
    def _ranks_belong_together(self) -> Resources:
        if self.cpu_ranks > 1 and self.gpus > 0:
            raise broken_rule("cpu_ranks", "GPUs bring one process each; leave cpu_ranks out, or set gpus to 0")
        if self.cpu_ranks > 1 and self.device == "cuda":
            raise broken_rule("cpu_ranks", "these processes compute on the CPU; set device to cpu or auto, or ask for gpus instead")
        if self.num_ranks == 1 and self.strategy == "fsdp":
            raise broken_rule("strategy", "one process has nothing to divide; set gpus (or cpu_ranks) to 2 or more, or strategy to ddp")
        return self
