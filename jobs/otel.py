"""OpenTelemetry spans and metrics over OTLP/HTTP, when `GRPO_OTEL_ENDPOINT` names a collector; needs the extra `otel`.

Everything is sent by threads of the SDK, in batches, and what a collector that is away does not take is dropped: nobody waits for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from jobs.settings import Settings, SettingsError
from jobs.traces import TraceContext

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Span, Tracer

Kind = Literal["internal", "server", "producer", "consumer"]
Attributes = dict[str, str | bool | int | float]

SEND_TIMEOUT_S = 5.0
CLOSE_S = 2.0
"""Longest an end waits for the last batch."""
_QUEUE = 8192
"""Spans that may wait; beyond it new ones are dropped."""


@dataclass
class _NextIds:
    """The ids the next span of this thread gets, when it must have certain ones."""

    local: threading.local = field(default_factory=threading.local)

    def take(self, name: str) -> int | None:
        value: int | None = getattr(self.local, name, None)
        setattr(self.local, name, None)
        return value

    def put(self, trace_id: int | None, span_id: int) -> None:
        self.local.trace, self.local.span = trace_id, span_id


def require_extra(settings: Settings) -> None:
    """Raises SettingsError when a collector is named and the extra is not installed."""
    if settings.otel_endpoint and find_spec("opentelemetry.exporter") is None:
        raise SettingsError("GRPO_OTEL_ENDPOINT needs the extra: pip install 'grpo-server[otel]'")


class Otel:
    """Spans and metrics of one process. Thread-safe; make it after a fork, never before one."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider, ids: _NextIds) -> None:
        self._tracers = tracers
        self._meters = meters
        self._ids = ids
        self._tracer: Tracer = tracers.get_tracer("grpo")
        self.meter: Meter = meters.get_meter("grpo")

    @classmethod
    def open(cls, settings: Settings, service: str, instance: str = "") -> Otel | None:
        """None when no collector is named. Raises SettingsError when the extra is not installed."""
        if not settings.otel_endpoint:
            return None
        require_extra(settings)
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {"service.name": service, "service.version": version("grpo-server")}
        resource = Resource.create({**named, "service.instance.id": instance} if instance else named)
        base, headers = settings.otel_endpoint.rstrip("/"), dict(part.split("=", 1) for part in settings.otel_headers)
        ids = _NextIds()
        tracers = TracerProvider(
            resource=resource, id_generator=_generator(ids), shutdown_on_exit=False, span_limits=SpanLimits(max_events=1000)
        )
        spans = OTLPSpanExporter(f"{base}/v1/traces", headers=headers, timeout=SEND_TIMEOUT_S)
        tracers.add_span_processor(BatchSpanProcessor(spans, max_queue_size=_QUEUE, schedule_delay_millis=1000))
        readings = OTLPMetricExporter(f"{base}/v1/metrics", headers=headers, timeout=SEND_TIMEOUT_S)
        reader = PeriodicExportingMetricReader(readings, export_interval_millis=1000 * settings.otel_interval_s)
        return cls(tracers, MeterProvider([reader], resource=resource, shutdown_on_exit=False), ids)

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        kind: Kind = "internal",
        start_s: float | None = None,
        attributes: Attributes | None = None,
        own: TraceContext | None = None,
    ) -> Span:
        """A span that its caller ends. `start_s`: Unix seconds, for one that began before. `own`: the ids it must have."""
        from opentelemetry import trace

        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if parent is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.is_sampled else trace.TraceFlags.DEFAULT)
            seen = trace.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(seen))
        if own is not None:
            self._ids.put(int(own.trace_id, 16) if parent is None else None, int(own.span_id, 16))
        return self._tracer.start_span(
            name, context, kind=trace.SpanKind[kind.upper()], attributes=attributes, start_time=nanoseconds(start_s)
        )

    def close(self, within_s: float = CLOSE_S) -> None:
        """Send what waits; after `within_s` what a slow collector has not taken is given up."""
        closing = threading.Thread(target=self._close, name="otel-close", daemon=True)
        closing.start()
        closing.join(within_s)

    def _close(self) -> None:
        metrics = threading.Thread(target=self._meters.shutdown, name="otel-close-metrics", daemon=True)
        metrics.start()
        self._tracers.shutdown()
        metrics.join()


def context_of(span: Span) -> TraceContext:
    """The span as the parent of others."""
    seen = span.get_span_context()
    return TraceContext(f"{seen.trace_id:032x}", f"{seen.span_id:016x}", seen.trace_flags.sampled)


def nanoseconds(seconds: float | None) -> int | None:
    """Unix seconds as the SDK counts them."""
    return None if seconds is None else int(seconds * 1e9)


def fail(span: Span, message: str) -> None:
    """Mark a span as failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, message[:500]))


def _generator(ids: _NextIds) -> IdGenerator:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Generator(RandomIdGenerator):
        """Random ids, unless the next span must have certain ones."""

        def generate_span_id(self) -> int:
            return ids.take("span") or super().generate_span_id()

        def generate_trace_id(self) -> int:
            return ids.take("trace") or super().generate_trace_id()

    return Generator()
