"""Converts a run's files to a trace: steps, groups, versions, evaluations and halts by process.

Records have the Trace Event Format: `ph` X is a slice, i an instant, C a counter, M a name; `ts` and `dur`
are microseconds. Groups have times of the ledger server, parts of steps have times of the trainer.
`write_perfetto` writes records to a file, `services.tracking.spans` converts them to spans.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import SettingsError
from protocol.host.atomic_file import check_absent, written_aside
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import (
    AcceptEvent,
    AppliedEvent,
    BoundEvent,
    ClaimEvent,
    CommitEvent,
    DrainEvent,
    DropEvent,
    GroupEvent,
    HaltEvent,
    LeaseEvent,
    LedgerEvent,
    LostEvent,
    RebuildEvent,
    ReleaseEvent,
    ResumeEvent,
    TakeEvent,
    UnhaltEvent,
)
from services.ledger.event_log.reader import read_events
from services.run_record.evaluations import Evaluation, describe_scores, read_evaluations
from services.run_record.steps import FILE as METRICS
from services.run_record.steps import numbers_of, read_steps

Record = dict[str, Any]
PARTS = ("wait", "train", "publish", "checkpoint", "other")
"""Parts of a step in order; metrics.jsonl has the field PART_s for each, in seconds."""
COUNTERS = {
    "lag": ("lag_mean", "lag_max"),
    "longest pause, ms": ("pause_ms",),
    "busy share": ("engine_busy", "reward_busy"),
}
"""Counter -> fields of metrics.jsonl that it shows."""
CUT_US = 1000
"""Microseconds by which a slice may overlap the previous one before it moves to another lane."""
INSTANTS = (BoundEvent, ClaimEvent, DrainEvent, HaltEvent, RebuildEvent, ResumeEvent, UnhaltEvent)
"""Events of the whole run, drawn as lines through all tracks."""
LEDGER, TRAINER, QUEUE, EVALUATION = "ledger", "trainer", "scored, in the queue", "evaluation"


@dataclass(slots=True)
class _Span:
    """A slice without an end so far."""

    process: str
    lane: int
    name: str
    begin_ms: int
    args: Mapping[str, Any]


@dataclass(slots=True)
class _Tracks:
    """Ids of processes and lanes, and the open slices."""

    pids: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, set[int]] = field(default_factory=dict)
    """Process -> lanes with an open slice: slices in a lane must not overlap."""
    open: dict[int, _Span] = field(default_factory=dict)
    """Group -> its open slice."""

    def pid(self, process: str) -> Iterator[Record]:
        """Yield the name record of a new process."""
        if process not in self.pids:
            self.pids[process] = len(self.pids) + 1
            yield {"ph": "M", "name": "process_name", "pid": self.pids[process], "args": {"name": process}}

    def begin(self, process: str, group: int, at_ms: int, args: Mapping[str, Any]) -> Iterator[Record]:
        """Begin a group's slice on the first free lane; yield the name records of new tracks."""
        yield from self.pid(process)
        used_lanes = self.lanes.setdefault(process, set())
        lane = next(number for number in range(1, len(used_lanes) + 2) if number not in used_lanes)
        used_lanes.add(lane)
        self.open[group] = _Span(process, lane, f"group {group}", at_ms, args)

    def end(self, group: int, at_ms: int, outcome: str) -> Iterator[Record]:
        """Yield the group's slice, if one is open."""
        if (span := self.open.pop(group, None)) is None:
            return
        self.lanes[span.process].discard(span.lane)
        yield {
            "ph": "X",
            "name": span.name,
            "pid": self.pids[span.process],
            "tid": span.lane,
            "ts": span.begin_ms * 1000,
            "dur": max(0, at_ms - span.begin_ms) * 1000,
            "args": {**span.args, "outcome": outcome},
        }


def write_perfetto(run_dir: Path, out: Path) -> int:
    """Write the trace of a run; return the number of records.

    Raises:
        SettingsError: there is no event log, or one of its lines is not an event; or `out` exists or
            cannot be written.
        OSError: another file of the run cannot be read; the error names it.
    """
    check_absent(out)
    steps, evaluations = read_steps(run_dir / METRICS), list(read_evaluations(run_dir))
    records = trace_records(read_events(run_dir / FILE), steps, evaluations)
    try:
        return _write(records, out)
    except OSError as error:
        raise SettingsError(f"{out} cannot be written: {error.strerror}") from None


def _write(records: Iterable[Record], out: Path) -> int:
    count = 0
    with written_aside(out) as aside, aside.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for record in without_overlaps(records):
            file.write((b",\n" if count else b"") + msgspec.json.encode(record))
            count += 1
        file.write(b"\n]}\n")
    return count


class TraceRecords:
    """Trace records of a run, converted from its files line by line."""

    def __init__(self) -> None:
        """Start without groups."""
        self._tracks = _Tracks()
        self._last_ms = 0

    @property
    def processes(self) -> Mapping[int, str]:
        """Id of each named process -> its name."""
        return {pid: name for name, pid in self._tracks.pids.items()}

    def step_records(self, line: Mapping[str, Any]) -> Iterator[Record]:
        """Yield the records of a step's line in metrics.jsonl."""
        yield from self._tracks.pid(TRAINER)
        yield from _step_records(self._tracks.pids[TRAINER], line)

    def evaluation_records(self, row: Evaluation) -> Iterator[Record]:
        """Yield the slice of a line in eval.jsonl."""
        yield from self._tracks.pid(EVALUATION)
        facts = {"set": row.set, "scores": ", ".join(describe_scores(row))}
        length_us, name = row.seconds * 1e6, f"version {row.version} on {row.set}"
        yield _slice(self._tracks.pids[EVALUATION], name, row.time * 1e6 - length_us, length_us, facts)

    def event_records(self, event: LedgerEvent) -> Iterator[Record]:
        """Yield the records of a logged event; events must be in order."""
        self._last_ms = event.time_ms
        yield from self._tracks.pid(TRAINER)
        yield from self._tracks.pid(LEDGER)
        yield from _event_records(self._tracks, event)

    def rest(self) -> Iterator[Record]:
        """Yield the open slices."""
        for group in [*self._tracks.open]:
            yield from self._tracks.end(group, self._last_ms, "not ended")


def trace_records(
    events: Iterable[LedgerEvent],
    steps: Iterable[Mapping[str, Any]],
    evaluations: Iterable[Evaluation] = (),
) -> Iterator[Record]:
    """Yield the records of a whole trace.

    Args:
        events: logged events, oldest first.
        steps: lines of metrics.jsonl, one per step.
        evaluations: lines of eval.jsonl.
    """
    records = TraceRecords()
    for row in evaluations:
        yield from records.evaluation_records(row)
    for line in steps:
        yield from records.step_records(line)
    for event in events:
        yield from records.event_records(event)
    yield from records.rest()


def without_overlaps(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records with slices moved or cut so that those in a lane do not overlap.

    Viewers drop overlapping slices. The clocks of two steps differ by microseconds, so small overlaps are
    cut; slices with larger overlaps, such as simultaneous evaluations, get another lane.
    """
    ends: dict[int, list[int]] = {}
    for record in records:
        if record["ph"] == "X" and not record["tid"]:
            end, lanes = record["ts"] + record["dur"], ends.setdefault(record["pid"], [])
            free = (i for i, before in enumerate(lanes) if before - record["ts"] <= CUT_US)
            lane = next(free, len(lanes))
            begin = max([record["ts"], *lanes[lane : lane + 1]])
            lanes[lane : lane + 1] = [max(begin, end)]
            record |= {"ts": begin, "dur": max(0, end - begin), "tid": lane}
        yield record


def _step_records(pid: int, line: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the parts of a step and its counters."""
    numbers = dict(numbers_of(line))
    seconds = [float(numbers.get(f"{part}_s", 0.0)) for part in PARTS]
    end_us = float(numbers.get("time", 0.0)) * 1e6
    begin_us = end_us - 1e6 * sum(seconds)
    for part, length_s in zip(PARTS, seconds, strict=True):
        if length_s > 0:
            args = {name: line.get(name) for name in ("step", "loss", "reward_mean", "pause_ms")}
            yield _slice(pid, f"{part} {line['step']}", begin_us, length_s * 1e6, args)
        begin_us += length_s * 1e6
    for counter, names in COUNTERS.items():
        values = {name: numbers.get(name, 0) for name in names}
        yield {"ph": "C", "name": counter, "pid": pid, "ts": round(end_us), "args": values}


def _slice(pid: int, name: str, begin_us: float, length_us: float, args: Mapping[str, Any]) -> Record:
    times = {"ts": round(begin_us), "dur": round(length_us)}
    return {"ph": "X", "name": name, "pid": pid, "tid": 0, **times, "args": args}


def _event_records(tracks: _Tracks, event: LedgerEvent) -> Iterator[Record]:
    """Yield the slices that an event ends, and the records that it begins."""
    at_ms, ledger = event.time_ms, tracks.pids[LEDGER]
    match event:
        case LeaseEvent():
            yield from tracks.end(event.group, at_ms, "leased again")
            facts = ("version", "deadline", "attempt", "holder", "engine")
            args = {name: getattr(event, name) for name in facts}
            yield from tracks.begin(event.holder.rpartition(".")[0], event.group, at_ms, args)
        case AcceptEvent():
            yield from tracks.end(event.group, at_ms, "accepted")
            args = {"reward": event.reward, "tokens": sum(event.counts.values())}
            yield from tracks.begin(QUEUE, event.group, at_ms, args)
        case TakeEvent():
            for group in event.groups:
                yield from tracks.end(group, at_ms, "taken")
                yield from tracks.begin("groups of the step", group, at_ms, {"step": event.step})
        case CommitEvent():
            for group in event.groups:
                yield from tracks.end(group, at_ms, "trained")
            yield _instant(tracks.pids[TRAINER], f"version {event.version}", at_ms, "p", {"step": event.step})
        case DropEvent():
            yield from tracks.end(event.group, at_ms, f"dropped: {event.reason}")
        case ReleaseEvent():
            yield from tracks.end(event.group, at_ms, f"released: {event.reason}")
        case LostEvent():
            yield from tracks.end(event.group, at_ms, event.kind)
        case AppliedEvent():
            service = event.engine.rpartition(".")[0]
            yield from tracks.pid(service)
            yield _instant(tracks.pids[service], f"serves version {event.version}", at_ms, "p", {})
        case _ if isinstance(event, INSTANTS):
            yield from _undo(tracks, event)
            facts = msgspec.to_builtins(event, str_keys=True)
            yield _instant(ledger, event.kind, at_ms, "g", facts)
    if isinstance(event, GroupEvent | TakeEvent | CommitEvent):
        lanes = {process: len(used_lanes) for process, used_lanes in tracks.lanes.items()}
        yield {"ph": "C", "name": "groups", "pid": ledger, "ts": at_ms * 1000, "args": lanes}


def _undo(tracks: _Tracks, event: LedgerEvent) -> Iterator[Record]:
    """Yield the slices that an event of the whole run ends; untaken groups return to the queue."""
    groups: Iterable[int] = ()
    match event:
        case ClaimEvent():
            groups = event.untaken
        case ResumeEvent():
            groups = event.waiting
        case RebuildEvent():
            groups = [*tracks.open]
    for group in groups:
        yield from tracks.end(group, event.time_ms, event.kind)
        if isinstance(event, ClaimEvent):
            yield from tracks.begin(QUEUE, group, event.time_ms, {})


def _instant(pid: int, name: str, at_ms: int, scope: str, args: Mapping[str, Any]) -> Record:
    """Return an instant; `scope` is p for the process's tracks, g for all tracks."""
    return {"ph": "i", "name": name, "pid": pid, "tid": 0, "ts": at_ms * 1000, "s": scope, "args": args}
