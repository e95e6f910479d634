"""What subscribers can be told, and the body that tells it: OpenAI's event shape with more in `data`."""

from __future__ import annotations

import secrets
from typing import Any

from jobs.ledger.records import EventRecord
from jobs.ledger.spelling import canonical_json

EVENT_TYPES: dict[str, str] = {
    "fine_tuning.job.created": "job.created",
    "fine_tuning.job.running": "job.running",
    "fine_tuning.job.paused": "job.paused",
    "fine_tuning.job.succeeded": "job.succeeded",
    "fine_tuning.job.failed": "job.failed",
    "fine_tuning.job.cancelled": "job.cancelled",
    "fine_tuning.job.detector_fired": "detector.fired",
    "fine_tuning.job.detector_cleared": "detector.cleared",
    "fine_tuning.job.guardrail_acted": "guardrail.acted",
    "fine_tuning.job.checkpoint_saved": "checkpoint.saved",
    "fine_tuning.job.checkpoint_promoted": "checkpoint.promoted",
}
"""Name to subscribers -> type in the job's history. The first six carry OpenAI's names where OpenAI has one."""
TYPE_OF = {kind: name for name, kind in EVENT_TYPES.items()}
_LEFT_OUT = frozenset({"files"})
"""Of an event's data: long, and the checkpoint's own address has them."""


def is_told(event: EventRecord) -> bool:
    """Whether subscribers hear of it: the rolling resume states are nobody's business."""
    return event.type in TYPE_OF and not (event.type == "checkpoint.saved" and event.data.get("kind") != "published")


def event_id(event: EventRecord) -> str:
    """The same for every subscriber and on each try, so that a receiver can tell repeats."""
    return f"evt_{event.number}"


def body_of(event: EventRecord) -> str:
    """The body of its deliveries."""
    data = {key: value for key, value in event.data.items() if key not in _LEFT_OUT}
    return _body(event_id(event), TYPE_OF[event.type], event.time, event.job_id, event.step, event.message, data)


def sample(event_type: str, now: float) -> tuple[str, str]:
    """Id and body of a test delivery."""
    identity = f"evt_test_{secrets.token_hex(12)}"
    return identity, _body(identity, event_type, now, "ftjob-test", None, "A test delivery.", {"test": True})


def _body(identity: str, event_type: str, at: float, job_id: str, step: int | None, message: str, details: dict[str, Any]) -> str:
    data = {"id": job_id, "step": step, "message": message, "details": details}
    return canonical_json({"object": "event", "id": identity, "type": event_type, "created_at": int(at), "data": data})
