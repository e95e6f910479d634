"""An OpenTelemetry collector for tests: a real OTLP/HTTP receiver that reads what it is sent with OTLP's own types."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.listener import Heard, Reply


@dataclass
class Seen:
    """A span, and which process sent it."""

    service: str
    span: Span

    @property
    def facts(self) -> dict[str, object]:
        """Its attributes."""
        return {pair.key: value(pair) for pair in self.span.attributes}


@dataclass
class Collector:
    """What came on /v1/traces and /v1/metrics below any prefix. `hold`: it takes requests and answers none until that is set."""

    hold: threading.Event | None = None
    spans: list[Seen] = field(default_factory=list)
    readings: dict[str, list[tuple[float, dict[str, object]]]] = field(default_factory=dict)
    """By metric: values (of a histogram, the count) with their attributes, oldest first."""
    keys: set[str] = field(default_factory=set)

    def hear(self, heard: Heard) -> Reply:
        """For `tests.listener.listen`."""
        self.keys.add(heard.headers.get("x-api-key", ""))
        if self.hold is not None:
            self.hold.wait(120)
            return Reply(status=503)
        if heard.target.endswith("/v1/traces"):
            for resource in ExportTraceServiceRequest.FromString(heard.body).resource_spans:
                service = next(str(value(pair)) for pair in resource.resource.attributes if pair.key == "service.name")
                self.spans += [Seen(service, span) for scope in resource.scope_spans for span in scope.spans]
        else:
            assert heard.target.endswith("/v1/metrics"), heard.target
            for kept in ExportMetricsServiceRequest.FromString(heard.body).resource_metrics:
                for metric in (metric for scope in kept.scope_metrics for metric in scope.metrics):
                    self.readings.setdefault(metric.name, []).extend(_points(metric))
        return Reply(headers={"content-type": "application/x-protobuf"})

    def named(self, name: str, trace: str) -> list[Seen]:
        """Spans of this name in this trace, in the order in which they came."""
        return [seen for seen in list(self.spans) if seen.span.name == name and seen.span.trace_id.hex() == trace]


def value(pair: KeyValue) -> object:
    """Of an attribute."""
    return getattr(pair.value, str(pair.value.WhichOneof("value")))


def _points(metric: Metric) -> list[tuple[float, dict[str, object]]]:
    if metric.HasField("histogram"):
        return [(point.count, {pair.key: value(pair) for pair in point.attributes}) for point in metric.histogram.data_points]
    points = metric.gauge.data_points if metric.HasField("gauge") else metric.sum.data_points
    return [
        (point.as_double if point.HasField("as_double") else point.as_int, {pair.key: value(pair) for pair in point.attributes})
        for point in points
    ]
