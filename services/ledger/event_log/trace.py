"""One group's life, from the event log alone: who held it and when, what became of its tokens, and how it
ended."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from protocol.lifecycle import Event, GroupState, after
from services.ledger.event_log.reader import with_journal_events
from services.ledger.redis.json_codec import decode_counts

ROWS = frozenset(str(event) for event in Event)
LEFT_OUT = ("seq", "time_ms", "event", "group", "chain")
"""Fields that every line has in its own place."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a group's life."""

    sequence: int
    time_ms: int
    """Unix time on the ledger's clock."""
    since_ms: int
    """Since the event before it; 0 for the first."""
    event: str
    """A row of the lifecycle table, expire or rebuild."""
    state: GroupState
    """Of the group after it."""
    facts: Mapping[str, Any]
    """What else the log says: holder, version, deadline, counts, reward, reason ..."""


def trace(events: Iterable[Mapping[str, Any]], group: int) -> list[Moment]:
    """The moments of a group's life, oldest first; empty if the log never names it."""
    moments: list[Moment] = []
    state, before = GroupState.WAITING, 0
    for event in with_journal_events(events):
        for name, facts in _concerns(event, group):
            if name in ROWS:
                state = after(state, Event(name)) or state
            elif name == "rebuild":
                state = GroupState(facts["state"])
            moments.append(
                Moment(
                    event["seq"],
                    event["time_ms"],
                    event["time_ms"] - before if moments else 0,
                    name,
                    state,
                    facts,
                )
            )
            before = event["time_ms"]
    return moments


def _concerns(event: Mapping[str, Any], group: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What an event does to the group: nothing, or one transition with its facts."""
    kind = event["event"]
    if event.get("group") == group:
        yield kind, {name: value for name, value in event.items() if name not in LEFT_OUT}
    elif kind == "take" and group in event["groups"]:
        yield "take", {"step": event["step"], "place": event["groups"].index(group), "epoch": event["epoch"]}
    elif kind == "commit" and str(group) in event["groups"]:
        trained = decode_counts(event["groups"][str(group)])
        lags = [event["step"] - version for version, n in trained.items() if n]
        yield (
            "commit",
            {"step": event["step"], "trained": event["groups"][str(group)], "lag_max": max(lags, default=0)},
        )
    elif kind == "claim" and group in event.get("untaken", ()):
        yield "untake", {"epoch": event["epoch"]}
    elif kind == "resume" and group in event.get("waiting", ()):
        yield "rewind", {"epoch": event["epoch"], "version": event["version"]}
    elif kind == "rebuild":
        for state in (GroupState.WAITING, GroupState.SCORED):
            if group in event.get(state, ()):
                yield "rebuild", {"state": state, "epoch": event["epoch"]}


def render_trace(group: int, moments: list[Moment]) -> str:
    """A group's life for people: how it stands, then a line an event with the time (UTC) and the seconds
    since the one before."""
    leases = [moment for moment in moments if moment.event == "lease"]
    seconds = (moments[-1].time_ms - moments[0].time_ms) / 1e3
    lines = [
        f"group {group}: {moments[-1].state} after {len(leases)} lease{'s' if len(leases) != 1 else ''}, {seconds:.3f} s in all"
    ]
    for moment in moments:
        clock = datetime.fromtimestamp(moment.time_ms / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        facts = "  ".join(f"{name} {_value(value)}" for name, value in moment.facts.items() if value != "")
        lines.append(
            f"{clock}  +{moment.since_ms / 1e3:.3f} s  {moment.event:<8} -> {moment.state:<8} {facts}"
        )
    return "\n".join(lines)


def _value(value: Any) -> str:
    """Counts as `tokens of version`, anything else as it is."""
    return (
        ", ".join(f"{n} of version {version}" for version, n in value.items())
        if isinstance(value, dict)
        else str(value)
    )
