"""Where a job belongs in a distributed trace (W3C Trace Context), and the ids its spans have whichever process makes them.

The context travels request -> `job.created` in the history -> the header of the Celery message -> the worker. A caller's `traceparent`
is kept and passed on whether or not this deployment exports spans (`jobs.otel`).
"""

from __future__ import annotations

import hashlib
import re
from contextvars import ContextVar
from dataclasses import dataclass

HEADER = "traceparent"
"""Of a request, of a Celery message, and the key in the data of `job.created` and `job.dispatched`."""
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True)
class TraceContext:
    """A span somewhere: the parent of what comes next."""

    trace_id: str
    """32 hex digits, not all zero."""
    span_id: str
    """16 hex digits, not all zero."""
    is_sampled: bool = True

    @classmethod
    def parse(cls, text: str | None) -> TraceContext | None:
        """What a `traceparent` says; None for none, and for one that breaks the form, which is to be ignored (W3C, 3.2)."""
        found = _FORM.fullmatch((text or "").strip())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]) or not int(found[2], 16) or not int(found[3], 16):
            return None
        return cls(found[2], found[3], bool(int(found[4], 16) & 1))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


CURRENT: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)
"""Of the request being answered; what it creates belongs to it."""


def job_span(job_id: str, origin: TraceContext | None) -> TraceContext:
    """The span of a job, the same in every process: in the trace of the request that created it, or in one of its own."""
    digest = hashlib.sha256(job_id.encode()).hexdigest()
    trace_id = digest[:32] if origin is None else origin.trace_id
    return TraceContext(trace_id, digest[32:48], True if origin is None else origin.is_sampled)
