"""An attempt as OpenTelemetry sees it: one span, a span for each step below it, the other engine events on it, and gauges of KL, beta
and reward. Made in the process that supervises the attempt, after its fork."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_engine.contract.event import EngineEvent, Outcome
from grpo_engine.contract.telemetry import DESCRIPTORS
from jobs.otel import Attributes, Otel, context_of, fail, nanoseconds
from jobs.traces import TraceContext

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, _Gauge

GAUGES = frozenset({"beta/applied", "reward/mean", "reward/std", "loss/total", "completion/length_mean", "time/step_s"})


class AttemptSpans:
    """From claim to verdict. Nothing here waits for a collector."""

    def __init__(self, otel: Otel, job_id: str, epoch: int, parent: TraceContext, *, worker: str, model: str) -> None:
        self._otel = otel
        self._job: dict[str, str] = {"grpo.job.id": job_id, "grpo.model": model}
        attributes: Attributes = {**self._job, "grpo.attempt": epoch, "grpo.worker": worker}
        self._span = otel.begin("attempt", parent, kind="consumer", attributes=attributes)
        self._context = context_of(self._span)
        self._gauges: dict[str, _Gauge] = {}
        self._steps: Counter = otel.meter.create_counter("grpo.steps", "{step}", "Steps completed, those done again included")

    def take(self, events: Sequence[EngineEvent]) -> None:
        """What the engine has said, in order."""
        for event in events:
            if event.type == "step.completed" and event.step is not None:
                self._step(event, event.step)
            else:
                words = {"message": event.message, "level": event.level}
                if event.step is not None:
                    words["grpo.step"] = str(event.step)
                self._span.add_event(event.type, words, nanoseconds(event.time))

    def end(self, outcome: Outcome | None, error: BaseException | None = None) -> None:
        """The verdict, or what kept one from being reached; then everything is sent, for a moment."""
        if outcome is not None:
            self._span.set_attributes({"grpo.outcome": outcome.status, "grpo.reason": outcome.reason, "grpo.step": outcome.last_step})
        if error is not None:
            fail(self._span, f"{type(error).__name__}: {error}")
        elif outcome is not None and outcome.status == "failed":
            fail(self._span, outcome.message)
        self._span.end()
        self._otel.close()

    def _step(self, event: EngineEvent, step: int) -> None:
        given = event.data.get("metrics")
        metrics = {name: float(value) for name, value in given.items() if _is_number(value)} if isinstance(given, Mapping) else {}
        seconds = metrics.get("time/step_s", 0.0)
        began = event.time - seconds if 0 <= seconds < 1e6 else event.time
        chosen = {name: value for name, value in metrics.items() if name in DESCRIPTORS and (name in GAUGES or _is_kl(name))}
        attributes: Attributes = {"grpo.step": step, **{_spelt(name): value for name, value in chosen.items()}}
        span = self._otel.begin("step", self._context, start_s=began, attributes=attributes)
        span.end(nanoseconds(event.time))
        self._steps.add(1, self._job)
        for name, value in chosen.items():
            if name not in self._gauges:
                known = DESCRIPTORS[name]
                self._gauges[name] = self._otel.meter.create_gauge(_spelt(name), known.unit, known.description)
            self._gauges[name].set(value, self._job)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_kl(name: str) -> bool:
    return name.startswith("kl/") and name.endswith("/mean")


def _spelt(name: str) -> str:
    return "grpo." + name.replace("/", ".")
