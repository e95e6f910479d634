"""What the engine says: one JSON object a line in `events.jsonl`, the same object in the Redis stream and over SSE.

`(epoch, seq)` identifies an engine event. Non-finite numbers are spelled `{"value": null, "nonfinite": "nan"}`.
"""

from __future__ import annotations

import json
import math
import signal
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from grpo_engine.contract.base import NonNegativeInt, PositiveInt, Strict

Level = Literal["info", "warn", "error"]

ENGINE_EVENTS: dict[str, str] = {
    "engine.started": "The engine process runs; data names versions, device and precision.",
    "model.provisioning": "The model is being fetched or converted; data counts bytes.",
    "model.loaded": "Policy (and reference) are in memory; data names parameters and the reference's sha256.",
    "data.loaded": "The training file was read; data counts rows, skipped rows and the longest prompt.",
    "run.rewound": "Steps after data.to_step are superseded by what follows.",
    "step.completed": "One step: data.metrics holds the telemetry, data.beta the beta rule's state, data.kl KL details when asked.",
    "beta.changed": "The beta rule acted; data holds old, new and the reason.",
    "control.applied": "A command took effect at data.effective_step; data holds old, new and actor.",
    "control.refused": "A command could not be applied; data holds the reason.",
    "checkpoint.saved": "A checkpoint is complete; data holds its name, step, kind and files.",
    "checkpoint.failed": "A checkpoint could not be written; training goes on.",
    "grader.failed": "A grader raised, hung or returned no finite number; data counts and quotes it.",
    "step.quarantined": "Non-finite numbers: the update was not applied.",
    "detector.fired": "A detector's condition holds; data holds its reading and threshold.",
    "detector.cleared": "The condition no longer holds.",
    "guardrail.acted": "A guardrail took its action.",
    "memory.reduced": "Memory ran out once; the step goes on, and the run from now on, with half as many tokens in a forward.",
    "shortcut.disabled": "A fast path disagreed with the plain forward and is not used.",
    "evaluation.completed": "The held-out file was graded with the weights after data.after_step; data holds reward_mean and its spread.",
    "rollouts.failed": "The step's completions could not be kept; training goes on.",
    "run.finished": "The engine is done; data repeats the outcome.",
}


class EngineEvent(Strict):
    """One line of `events.jsonl`."""

    epoch: PositiveInt
    seq: PositiveInt
    """1, 2, 3 ... within the epoch."""
    time: float
    """Unix seconds, UTC."""
    type: str
    level: Level = "info"
    step: NonNegativeInt | None = None
    message: str = Field(max_length=4096)
    data: dict[str, Any] = Field(default_factory=dict)

    @property
    def stream_id(self) -> str:
        """Id in the Redis stream and in SSE."""
        return f"{self.epoch}-{self.seq}"

    def to_line(self) -> str:
        """The event as strict JSON without a line break."""
        return json.dumps(encode_nonfinite(self.model_dump()), separators=(",", ":"), allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True)
class Progress:
    """How far an attempt came, from its events."""

    last_step: int = 0
    """Of the last `step.completed` or `run.rewound`."""
    resume_checkpoint: str | None = None
    """Name of the newest resume state announced."""

    def after(self, event: EngineEvent) -> Progress:
        """As it stands when the event has been said."""
        match event.type, event.data:
            case "step.completed", _ if event.step is not None:
                return Progress(event.step, self.resume_checkpoint)
            case "run.rewound", {"to_step": int(step)}:
                return Progress(step, self.resume_checkpoint)
            case "checkpoint.saved", {"kind": "resume", "name": str(name)}:
                return Progress(self.last_step, name)
        return self


def signal_name(number: int) -> str:
    """What ended a process, as people call it: `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def encode_nonfinite(value: Any) -> Any:
    """Spell NaN and infinities so that the result is strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        name = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return {"value": None, "nonfinite": name}
    if isinstance(value, dict):
        return {key: encode_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_nonfinite(item) for item in value]
    return value


WORKER_LOST = "worker_lost"
"""The reason in a verdict that was written for an engine nobody could reach: if it lives, it deletes nothing and is ended."""


class Outcome(Strict):
    """The engine's verdict, `outcome.json`, written once and atomically."""

    status: Literal["succeeded", "stopped", "failed"]
    """`stopped`: ended on command with a resumable checkpoint."""
    reason: str
    """A stable word: completed, max_seconds, pause, drain, config_error, reference_mismatch, checkpoint_damaged,
    checkpoint_failed, nonfinite, grader, out_of_memory, guardrail, crash."""
    message: str
    retryable: bool
    last_step: NonNegativeInt
    resume_checkpoint: str | None = None
    """Name of the newest resumable checkpoint of this attempt."""
    param: str | None = None


EXIT_SUCCEEDED = 0
EXIT_STOPPED = 85
EXIT_CONFIG = 86
EXIT_DIVERGED = 87
