"""The life of a job: its states, what may follow what, and how both vocabularies outside name them.

A transition is a compare-and-swap on (state, epoch); terminal states are written once. `Wanted` says what somebody
asked for and decides what follows `stopping`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
Phase = Literal[
    "validating", "queued", "provisioning", "rolling_out", "training", "checkpointing", "pausing", "paused",
    "resuming", "cancelling", "publishing", "terminal",
]  # fmt: skip


class State(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    """Accepted; waits for the dispatcher."""
    DISPATCHED = "dispatched"
    """An attempt has its number and its message; no worker has claimed it."""
    RUNNING = "running"
    """A worker holds the claim."""
    STOPPING = "stopping"
    """The attempt is being ended; `wanted` decides what follows."""
    PAUSED = "paused"
    """No attempt; continues from its checkpoint on `resume`."""
    SUCCEEDED = "succeeded"
    """All steps done; final."""
    FAILED = "failed"
    """Ended with an error; final."""
    CANCELLED = "cancelled"
    """Ended by request; final."""

    @property
    def is_terminal(self) -> bool:
        """Nothing follows."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)

    @property
    def has_attempt(self) -> bool:
        """An attempt may be claimed or is running."""
        return self in (State.DISPATCHED, State.RUNNING, State.STOPPING)


class Wanted(StrEnum):
    """What was asked of a job."""

    RUN = "run"
    """Go on to the end."""
    PAUSE = "pause"
    """Finish the step, checkpoint, free the slot, stay."""
    CANCEL = "cancel"
    """End now, without a checkpoint."""
    REQUEUE = "requeue"
    """Finish the step, checkpoint, continue in a new attempt."""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.DISPATCHED, State.PAUSED, State.CANCELLED, State.FAILED}),
    State.DISPATCHED: frozenset({State.RUNNING, State.STOPPING, State.QUEUED, State.PAUSED, State.CANCELLED, State.FAILED}),
    State.RUNNING: frozenset({State.STOPPING, State.QUEUED, State.PAUSED, State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    State.STOPPING: frozenset({State.QUEUED, State.PAUSED, State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


@dataclass(frozen=True)
class Face:
    """How a state looks from outside."""

    status: Status
    """OpenAI's word."""
    phase: Phase
    """Ours; `running` refines it by what the engine does, `stopping` by what is wanted."""


FACES: dict[State, Face] = {
    State.QUEUED: Face("queued", "queued"),
    State.DISPATCHED: Face("queued", "queued"),
    State.RUNNING: Face("running", "training"),
    State.STOPPING: Face("running", "pausing"),
    State.PAUSED: Face("paused", "paused"),
    State.SUCCEEDED: Face("succeeded", "terminal"),
    State.FAILED: Face("failed", "terminal"),
    State.CANCELLED: Face("cancelled", "terminal"),
}

ACTIVITY_PHASES: dict[str, Phase] = {
    "": "provisioning",
    "engine.started": "provisioning",
    "model.provisioning": "provisioning",
    "model.loaded": "rolling_out",
    "data.loaded": "rolling_out",
    "run.rewound": "resuming",
    "step.completed": "training",
    "checkpoint.saved": "training",
    "run.finished": "publishing",
}
"""The phase of a running attempt by its latest engine event among these."""


def status_of(state: State) -> Status:
    """OpenAI's `status`."""
    return FACES[state].status


def phase_of(state: State, wanted: Wanted, activity: str) -> Phase:
    """Our `phase`; `activity` is the type of the attempt's latest telling engine event, empty before the first."""
    if state is State.RUNNING:
        return ACTIVITY_PHASES.get(activity, "training")
    if state is State.STOPPING and wanted is Wanted.CANCEL:
        return "cancelling"
    return FACES[state].phase


def states_of_status(status: str) -> frozenset[State]:
    """The states OpenAI's `status` covers; empty for a word that is none of theirs or that no state has."""
    return frozenset(state for state, face in FACES.items() if face.status == status)
