"""Follows the end of the event log: sentences, served versions over time, drops, bounds.

Only the last `TAIL_BYTES` are read, and every collection is bounded, because the log of a year-long run does
not fit into memory.
"""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

from protocol.lifecycle import NO_SIGNAL
from protocol.staleness import Bound
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import (
    AppliedEvent,
    BoundEvent,
    ClaimEvent,
    CommitEvent,
    CreateEvent,
    DrainEvent,
    DropEvent,
    HaltEvent,
    LeaseEvent,
    LedgerEvent,
    RebuildEvent,
    ResumeEvent,
    StepsEvent,
    UnhaltEvent,
    decode_line,
    event_bound,
)
from services.ledger.limits import MAX_DETAIL
from services.run_record.lines import LineFollower
from services.run_record.log_queries import filtered_group
from services.run_record.sentences import TOPICS, Sentence, sentence_of

TAIL_BYTES = 32 << 20
KEPT_SENTENCES = 300
"""Number of sentences kept per topic."""
KEPT_VERSIONS = 48
"""Number of versions kept per engine, and of commits."""
KEPT_ENGINES = 64
KEPT_GROUPS = 50_000
"""Number of leases and trained groups with stored lease tokens."""
KEPT_FILTERED = 10_000
"""Number of newest groups without signal that are kept."""
KEPT_CHANGES = 256
KEPT_DETAILS = 100
"""Maximum number of different errors of drops; further errors count under the verifier's name."""
TOTALS = ("version", "issued", "trained", "dropped")
"""Fields of a commit or rebuild event that `EventTail.state` returns."""
_HEAD_BYTES = 1 << 14


class EventTail:
    """End of a run's event log. Methods block briefly and are thread-safe."""

    def __init__(self, run_dir: Path, tail_bytes: int = TAIL_BYTES) -> None:
        """Store the arguments; the log need not exist."""
        self._follower = LineFollower(run_dir / FILE, tail_bytes)
        self._starts = 0
        self._lock = threading.Lock()
        self._reset()

    def read_all(self) -> "EventTail":
        """Read the log to its end; return the tail itself."""
        while self.read_more():
            pass
        return self

    def read_more(self) -> bool:
        """Read the next part of the log; return whether more can be read at once."""
        lines, more = self._follower.read()
        with self._lock:
            if self._follower.starts != self._starts:
                self._starts = self._follower.starts
                self._reset()
                if not self._follower.is_complete:
                    self._add_first_event()
            for line in lines:
                self._add(line.data)
        return more

    def sentences(self, after: int, topics: Collection[str], limit: int) -> dict[str, Any]:
        """Return the newest sentences with numbers above `after`, at most `limit`, oldest first."""
        with self._lock:
            sentences = [
                sentence
                for topic in topics
                for sentence in self._sentences.get(topic, ())
                if sentence.seq > after
            ]
            sentences.sort(key=lambda sentence: sentence.seq)
            return {"last": self.last_sequence, "events": [item._asdict() for item in sentences[-limit:]]}

    def versions(self, after: int) -> dict[str, Any]:
        """Return when versions were committed and when each engine began to serve them.

        Returns:
            `last` (number of the newest relevant event), and `unchanged` if `last` is not above `after`; else
            `commits` (rows of version and Unix ms) and `engines` (each with its incarnation, such rows, and
            `last_ms`, the Unix ms of its newest version or lease).
        """
        with self._lock:
            if after and after >= self._versions_changed:
                return {"last": self._versions_changed, "unchanged": True}
            return {
                "last": self._versions_changed,
                "commits": list(self._commits),
                "engines": [
                    {"engine": engine, "served": list(served), "last_ms": self._last_ms[engine]}
                    for engine, served in self._served.items()
                ],
            }

    def bounds(self) -> list[tuple[int, int, int, str]]:
        """Return the bound over time: rows (first version, max_staleness, groups_per_step, policy)."""
        with self._lock:
            return list(self._bounds)

    def state(self) -> dict[str, Any]:
        """Return the fields of `collect_status` that the log has."""
        with self._lock:
            bound = self._bounds[-1] if self._bounds else None
            return {
                **self._counters,
                "dropped_by_reason": dict(self._drops),
                "wasted_by_reason": dict(self._wasted),
                "drop_details": dict(self._details),
                "drops_since_event": 0 if self._follower.is_complete else self._first_sequence,
                "bound": None
                if bound is None
                else {"max_staleness": bound[1], "groups_per_step": bound[2], "policy": bound[3]},
            }

    def trained_groups(self, step: int) -> list[tuple[int, str]]:
        """Return the groups of a committed step with their lease tokens; empty if unknown."""
        with self._lock:
            return list(self._steps.get(step, ()))

    def trained_steps(self) -> list[int]:
        """Return the steps known to `trained_groups`, in order."""
        with self._lock:
            return sorted(self._steps)

    def filtered_groups(self, step: int) -> list[dict[str, Any]]:
        """Return the groups dropped without signal between the previous step's commit and this step's.

        Each has `group`, `reward` (mean over all its samples), and `tokens` (number of sampled tokens).
        """
        with self._lock:
            return [dict(found) for found in self._filtered if found["step"] == step]

    def _reset(self) -> None:
        self.last_sequence = 0
        """Number of the newest event."""
        self._first_sequence = 0
        self._sentences: dict[str, deque[Sentence]] = {
            topic: deque(maxlen=KEPT_SENTENCES) for topic in TOPICS
        }
        self._commits: deque[tuple[int, int]] = deque(maxlen=KEPT_VERSIONS)
        self._served: OrderedDict[str, deque[tuple[int, int]]] = OrderedDict()
        self._last_ms: dict[str, int] = {}
        self._versions_changed = 0
        self._bounds: deque[tuple[int, int, int, str]] = deque(maxlen=KEPT_CHANGES)
        self._drops: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()
        self._counters: dict[str, Any] = {"version": 0, "epoch": "", "halted": "", "draining": False}
        self._details: Counter[str] = Counter()
        self._tokens: OrderedDict[int, str] = OrderedDict()
        self._steps: OrderedDict[int, tuple[tuple[int, str], ...]] = OrderedDict()
        self._held_groups = 0
        self._filtered: deque[dict[str, Any]] = deque(maxlen=KEPT_FILTERED)

    def _add_first_event(self) -> None:
        """Read the log's first line, which describes the run and is not part of the tail."""
        try:
            with self._follower.path.open("rb") as file:
                self._add(file.readline(_HEAD_BYTES))
        except OSError:
            return
        self._first_sequence = 0

    def _add(self, data: bytes) -> None:
        event = decode_line(data)
        if not event.seq:  # not an event; `tether verify` reports the line
            return
        sentence = sentence_of(event)
        self.last_sequence = event.seq
        self._first_sequence = self._first_sequence or event.seq
        self._sentences[sentence.topic].append(sentence)
        self._counters["time_ms"] = event.time_ms
        self._note(event)

    def _note(self, event: LedgerEvent) -> None:
        counters = self._counters
        match event:
            case LeaseEvent():
                self._note_bound(event.version, Bound(event.bound, event.groups_per_step, event.policy))
                self._tokens[event.group] = event.token
                if event.engine in self._served:
                    self._last_ms[event.engine] = event.time_ms
                while len(self._tokens) > KEPT_GROUPS:
                    self._tokens.popitem(last=False)
            case AppliedEvent():
                self._note_served(event)
            case CommitEvent():
                self._note_commit(event)
            case CreateEvent():
                self._note_bound(counters["version"], event_bound(event))
                counters |= {"steps": event.steps, "prompts": event.prompts}
            case BoundEvent():
                self._note_bound(counters["version"], event_bound(event))
            case DropEvent():
                self._note_drop(event)
            case ClaimEvent():
                counters["epoch"] = event.epoch
            case RebuildEvent():  # contains commits and accepts that the log lacks
                counters |= {name: getattr(event, name) for name in ("epoch", *TOTALS)}
                counters["active"] = event.issued - event.trained - event.dropped
            case ResumeEvent(continued=False):
                counters["version"] = event.version
                for step in [step for step in self._steps if step >= event.version]:
                    self._held_groups -= len(self._steps.pop(step))
            case HaltEvent():
                counters |= {"halted": event.reason, "halted_ms": event.time_ms}
            case UnhaltEvent():
                counters |= {"halted": "", "halted_ms": 0}
            case DrainEvent():
                counters["draining"] = event.on
            case StepsEvent():
                counters["steps"] = event.steps

    def _note_drop(self, event: DropEvent) -> None:
        reason = event.reason[:80]
        self._drops[reason] += 1
        self._wasted[reason] += event.wasted_tokens
        if reason == NO_SIGNAL and (self._commits or self._follower.is_complete):
            reward, tokens = event.reward, event.wasted_tokens
            self._filtered.append(filtered_group(event.group, reward, tokens, self._counters["version"]))
        if event.detail:
            self._count_detail(event.detail[:MAX_DETAIL])
        self._tokens.pop(event.group, None)

    def _count_detail(self, detail: str) -> None:
        if detail not in self._details and len(self._details) >= KEPT_DETAILS:
            detail = ":".join(detail.split(":")[:2])  # such as reward:math
        self._details[detail] += 1

    def _note_bound(self, version: int, bound: Bound) -> None:
        row = (bound.max_staleness, bound.groups_per_step, str(bound.policy))
        if not self._bounds or self._bounds[-1][1:] != row:
            self._bounds.append((version, *row))

    def _note_served(self, event: AppliedEvent) -> None:
        served = self._served.setdefault(event.engine, deque(maxlen=KEPT_VERSIONS))
        self._served.move_to_end(event.engine)
        served.append((event.version, event.time_ms))
        self._last_ms[event.engine] = event.time_ms
        while len(self._served) > KEPT_ENGINES:
            del self._last_ms[self._served.popitem(last=False)[0]]
        self._versions_changed = event.seq

    def _note_commit(self, event: CommitEvent) -> None:
        self._counters |= {name: getattr(event, name) for name in (*TOTALS, "active")}
        while self._commits and self._commits[-1][0] >= event.version:  # versions abandoned by a rewind
            self._commits.pop()
        self._commits.append((event.version, event.time_ms))
        self._versions_changed = event.seq
        keys = tuple(
            (group, self._tokens.pop(group)) for group in sorted(event.groups) if group in self._tokens
        )
        self._held_groups += len(keys) - len(self._steps.pop(event.step, ()))
        self._steps[event.step] = keys
        while self._held_groups > KEPT_GROUPS:
            self._held_groups -= len(self._steps.popitem(last=False)[1])
