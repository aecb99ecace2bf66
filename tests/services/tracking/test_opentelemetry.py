"""Tests the spans that a collector gets over HTTP, and those that stay in the run directory."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from protocol.errors import TetherError
from services.settings.load import run_settings
from services.tracking.registry import open_tracker
from services.tracking.spans import TraceSpan, span_id, trace_id
from services.tracking.tracked_run import TrackedRun
from tests.contracts.tracker_suite import options
from tests.services.monitor.runs import recorded_run

SPAN = TraceSpan(
    "group 7", "group 7", "rollout.0", 1_000_000, 3_500_000, {"version": 2, "no": None, "t": [1]}
)
INSTANT = TraceSpan("halt", "halt", "ledger", 4_000_000, 4_000_000, {})


class Collector(ThreadingHTTPServer):
    """A collector that decodes requests with OpenTelemetry's own messages."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[Any] = []

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Collector)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def test_a_collector_gets_spans_with_their_times_and_facts(tmp_path: Path, collector: Collector) -> None:
    tracker = open_tracker("opentelemetry", options(tmp_path, offline=False))
    tracker.log([SPAN, INSTANT])
    tracker.close()
    assert str(collector.server_port) in tracker.url
    first, second = collector.spans
    assert (first.name, first.start_time_unix_nano, first.end_time_unix_nano) == (
        "group 7",
        10**9,
        35 * 10**8,
    )
    assert int.from_bytes(first.trace_id, "big") == trace_id(tracker.run_id, SPAN)
    assert int.from_bytes(first.span_id, "big") == span_id(tracker.run_id, SPAN)
    facts = {item.key: item.value for item in first.attributes}
    assert (facts["tether.process"].string_value, facts["version"].int_value) == ("rollout.0", 2)
    assert (facts["t"].string_value, "no" in facts) == ("[1]", False)
    assert second.start_time_unix_nano == second.end_time_unix_nano
    resource = {
        item.key: item.value.string_value
        for item in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert (resource["service.name"], resource["tether.run"]) == ("tether-test", "a-run")


def test_spans_that_a_collector_refuses_are_an_error(tmp_path: Path, collector: Collector) -> None:
    collector.status = 400
    tracker = open_tracker("opentelemetry", options(tmp_path, offline=False))
    with pytest.raises(TetherError, match="did not take 1 spans"):
        tracker.log([SPAN])
    tracker.close()


def test_offline_spans_are_lines_of_json_with_ids_in_hex(tmp_path: Path) -> None:
    tracker = open_tracker("opentelemetry", options(tmp_path))
    tracker.log([SPAN])
    tracker.log([INSTANT])
    tracker.close()
    first, _ = map(json.loads, (tmp_path / "kind" / "traces.jsonl").read_text().splitlines())
    (span,) = first["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert span["traceId"] == f"{trace_id(tracker.run_id, SPAN):032x}"
    assert (span["spanId"], span["name"]) == (f"{span_id(tracker.run_id, SPAN):016x}", "group 7")


def test_a_run_is_sent_whole_and_once(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    settings = run_settings(run_dir, ["tracking.kind=opentelemetry", "tracking.offline=true"])
    for _ in range(2):
        run = TrackedRun("opentelemetry", settings)
        run.finish()
        assert run.state.problem == ""
    lines = (run_dir / "tracking/opentelemetry/traces.jsonl").read_text().splitlines()
    spans = [
        span
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert len(spans) == run.state.sent == len({(span["traceId"], span["spanId"]) for span in spans})
    names = [span["name"] for span in spans]
    assert names.count("train 3") == 1
    assert names.count("group 3") >= 3
