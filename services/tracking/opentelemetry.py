"""Sends spans by OTLP over HTTP, or writes them as OTLP's JSON lines to the run directory."""

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from protocol.errors import TetherError
from services.tracking.base import TrackerOptions
from services.tracking.spans import TraceSpan, span_id, trace_id

BATCH = 1000
"""Maximum number of spans per request."""
FILE = "traces.jsonl"
"""Offline file with one line per request, for the collector's `otlpjsonfile` receiver."""
IDS = ("traceId", "spanId")
"""Fields that are hexadecimal in OTLP's JSON and base64 in the JSON of Protocol Buffers."""


class OpenTelemetryTracker:
    """Exporter of one run's spans; a span that is sent again has the same ids."""

    def __init__(self, options: TrackerOptions) -> None:
        """Open the exporter to OTEL_EXPORTER_OTLP_ENDPOINT."""
        self.run_id = options.run_id or options.name
        self._resource = Resource.create({"service.name": options.project, "tether.run": options.name})
        self._file = Path(options.directory) / FILE if options.offline else None
        self._exporter = None if options.offline else OTLPSpanExporter()
        self.url = str(self._file or self._exporter._endpoint)  # type: ignore[union-attr]

    def log(self, points: Sequence[TraceSpan]) -> None:
        """Send spans.

        Raises:
            TetherError: the collector did not accept the spans.
        """
        for begin in range(0, len(points), BATCH):
            spans = [self._readable(span) for span in points[begin : begin + BATCH]]
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps(_as_json(spans)) + "\n")
            elif self._exporter.export(spans) is not SpanExportResult.SUCCESS:  # type: ignore[union-attr]
                raise TetherError(f"{self.url} did not take {len(spans)} spans")

    def close(self) -> None:
        """Close the exporter."""
        if self._exporter is not None:
            self._exporter.shutdown()

    def _readable(self, span: TraceSpan) -> ReadableSpan:
        flags = TraceFlags(TraceFlags.SAMPLED)
        context = SpanContext(trace_id(self.run_id, span), span_id(self.run_id, span), False, flags)
        facts = {name: _attribute(value) for name, value in span.facts.items() if value is not None}
        return ReadableSpan(
            span.name,
            context=context,
            resource=self._resource,
            attributes={"tether.process": span.process, **facts},
            start_time=span.begin_us * 1000,
            end_time=span.end_us * 1000,
        )


def _attribute(value: Any) -> str | bool | int | float:
    """Convert a fact to an attribute: a list or a table becomes JSON."""
    return value if isinstance(value, (str, bool, int, float)) else json.dumps(value)


def _as_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    message: dict[str, Any] = MessageToDict(encode_spans(spans))
    for span in _spans_in(message):
        for name in IDS:
            span[name] = base64.b64decode(span[name]).hex()
    return message


def _spans_in(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in message["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]
