"""Traces one group through the event log: its holders, times, tokens and final state."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from protocol.lifecycle import Event, GroupState, after
from protocol.staleness import lag
from services.ledger.event_log.events import (
    ClaimEvent,
    CommitEvent,
    GroupEvent,
    LedgerEvent,
    RebuildEvent,
    ResumeEvent,
    TakeEvent,
)
from services.ledger.event_log.reader import with_journal_events
from services.ledger.interface import JournalAccept, JournalCommit, JournalEvent

_TRANSITIONS = frozenset(str(event) for event in Event)
_COMMON_FIELDS = ("seq", "time_ms", "event", "group")
"""Fields of every event that `Moment` stores separately or omits."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One event in the history of a group."""

    time_ms: int
    """Unix time of the ledger's clock, in ms."""
    since_ms: int
    """Time since the previous event, in ms; 0 for the first."""
    event: str
    """Name of a transition of the lifecycle table, `expire` or `rebuild`."""
    state: GroupState
    """State of the group after the event."""
    facts: Mapping[str, Any]
    """Other logged values: holder, version, deadline, counts, reward, reason ..."""


def trace(events: Iterable[LedgerEvent], group: int) -> list[Moment]:
    """Return the events of a group, oldest first; empty if the log does not contain the group."""
    moments: list[Moment] = []
    state, last_ms = GroupState.WAITING, 0
    for place, event in with_journal_events(events):
        for name, facts in _moments_of(event, group):
            if name in _TRANSITIONS:
                state = after(state, Event(name)) or state
            elif name == "rebuild":
                state = GroupState(facts["state"])
            since_ms = place.time_ms - last_ms if moments else 0
            moments.append(Moment(place.time_ms, since_ms, name, state, facts))
            last_ms = place.time_ms
    return moments


def _moments_of(event: LedgerEvent | JournalEvent, group: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the transitions of the group in an event, with their facts."""
    match event:
        case GroupEvent() if event.group == group:
            yield event.kind, _facts(event)
        case JournalAccept() if event.group == group:
            yield "accept", _facts(event)
        case TakeEvent() if group in event.groups:
            place = event.groups.index(group)
            yield "take", {"step": event.step, "place": place, "epoch": event.epoch}
        case CommitEvent() | JournalCommit() if group in event.groups:
            trained = event.groups[group]
            counts = {str(version): n for version, n in trained.items()}
            lag_max = max((lag(event.step, version) for version, n in trained.items() if n), default=0)
            yield "commit", {"step": event.step, "trained": counts, "lag_max": lag_max}
        case ClaimEvent() if group in event.untaken:
            yield "untake", {"epoch": event.epoch}
        case ResumeEvent() if group in event.waiting:
            yield "rewind", {"epoch": event.epoch, "version": event.version}
        case RebuildEvent():
            for state, groups in ((GroupState.WAITING, event.waiting), (GroupState.SCORED, event.scored)):
                if group in groups:
                    yield "rebuild", {"state": state, "epoch": event.epoch}


def _facts(event: GroupEvent | JournalAccept) -> dict[str, Any]:
    fields = msgspec.to_builtins(event, str_keys=True)
    return {name: value for name, value in fields.items() if name not in _COMMON_FIELDS}


def render_trace(group: int, moments: list[Moment]) -> str:
    """Format the history of a group: a summary, then one line per event.

    Each line contains the time (UTC) and the seconds since the previous event.
    """
    leases = sum(moment.event == "lease" for moment in moments)
    seconds = (moments[-1].time_ms - moments[0].time_ms) / 1e3
    lines = [
        f"group {group}: {moments[-1].state} after {leases} lease{'s' if leases != 1 else ''}, "
        f"{seconds:.3f} s in all"
    ]
    for moment in moments:
        clock = datetime.fromtimestamp(moment.time_ms / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        facts = "  ".join(f"{name} {_value(value)}" for name, value in moment.facts.items() if value != "")
        lines.append(
            f"{clock}  +{moment.since_ms / 1e3:.3f} s  {moment.event:<8} -> {moment.state:<8} {facts}"
        )
    return "\n".join(lines)


def _value(value: Any) -> str:
    """Format counts as `N of version V`, and other values with `str`."""
    if isinstance(value, dict):
        return ", ".join(f"{n} of version {version}" for version, n in value.items())
    return str(value)
