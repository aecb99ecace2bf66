"""Reads spans from a run's event log, metrics.jsonl and eval.jsonl, after the last process's offsets."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from services.ledger.event_log.archiver import FILE as EVENTS
from services.ledger.event_log.events import decode_line
from services.run_record.evaluations import FILE as EVALUATIONS
from services.run_record.evaluations import parse_evaluation
from services.run_record.lines import LineFollower
from services.run_record.steps import FILE as METRICS
from services.run_record.steps import parse_line
from services.tracking.trace_records import Record, TraceRecords


class TraceSpan(NamedTuple):
    """A slice or an instant in a run's trace."""

    trace: str
    """Trace of the span, such as "group 7" or "step 3"."""
    name: str
    process: str
    begin_us: int
    """Unix time, microseconds."""
    end_us: int
    """Unix time, microseconds; equals `begin_us` for an instant."""
    facts: Mapping[str, Any]


class SpanReader:
    """Reader of spans, with the groups whose slices have begun."""

    files: tuple[str, ...] = (EVENTS, METRICS, EVALUATIONS)

    def __init__(self, run_dir: Path, offsets: Mapping[str, int]) -> None:
        """Read the lines before `offsets` (file -> bytes) again: later spans may have begun there."""
        self._records = TraceRecords()
        end, more = offsets.get(EVENTS, 0), offsets.get(EVENTS, 0) > 0
        log = LineFollower(run_dir / EVENTS)
        while more:
            lines, more = log.read()
            for line in lines:
                if line.offset < end:
                    self.items(EVENTS, line.data, 0)
            more = more and log.offset < end

    def items(self, file: str, data: bytes, ordinal: int) -> list[TraceSpan]:
        """Return the spans that end with a line of a file."""
        if file == EVENTS:
            return self._spans(self._records.event_records(decode_line(data)))
        if file == EVALUATIONS:
            row = parse_evaluation(data)
            return [] if row is None else self._spans(self._records.evaluation_records(row))
        step = parse_line(data)
        return [] if step is None else self._spans(self._records.step_records(step))

    def version_of(self, item: TraceSpan) -> None:
        """Return None: spans have no version axis."""

    def finish(self) -> None:
        """Do nothing: spans depend on no other file."""

    def _spans(self, records: Iterable[Record]) -> list[TraceSpan]:
        drawn = [record for record in records if record["ph"] in "Xi"]
        processes = self._records.processes
        return [_span(record, processes[record["pid"]]) for record in drawn]


def _span(record: Record, process: str) -> TraceSpan:
    name, facts, begin_us = record["name"], record["args"], record["ts"]
    trace = f"step {facts['step']}" if "step" in facts and not name.startswith("group") else name
    return TraceSpan(trace, name, process, begin_us, begin_us + record.get("dur", 0), facts)


def trace_id(run: str, span: TraceSpan) -> int:
    """Return a reproducible 128-bit id of a span's trace."""
    return xxhash.xxh3_128_intdigest(f"{run} {span.trace}".encode()) or 1


def span_id(run: str, span: TraceSpan) -> int:
    """Return a reproducible 64-bit id of a span."""
    key = f"{run} {span.process} {span.name} {span.begin_us} {span.end_us}"
    return xxhash.xxh3_64_intdigest(key.encode()) or 1
