"""Writes events of the ledger as English sentences. Fields are those of `services.ledger.event_log`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from protocol.lifecycle import NO_SIGNAL
from services.observability.status import describe_halt

Event = Mapping[str, Any]


class Sentence(NamedTuple):
    """One event for the page."""

    seq: int
    """Number of the event."""
    time_ms: int
    """Unix time on the ledger's clock."""
    kind: str
    """The event's name."""
    topic: str
    """One of `TOPICS`."""
    level: str
    """info, good, warn or bad."""
    text: str


def short_name(incarnation: str) -> str:
    """Return the name of a process without the random part of its incarnation."""
    name, dot, _ = incarnation.rpartition(".")
    return name if dot else incarnation


def _count(value: Any, noun: str) -> str:
    """Return a number with its noun; lists count their items."""
    number = len(value) if isinstance(value, (list, tuple, dict)) else value
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bound(event: Event) -> str:
    return (
        f"max_staleness {event['max_staleness']}, {_count(event['groups_per_step'], 'group')} per step, "
        f"policy {event['policy']}"
    )


def _accept(event: Event) -> str:
    tokens = sum(event.get("counts", {}).values())
    reward = f", mean reward {event['reward']:.3g}" if "reward" in event else ""
    return f"Group {event['group']} was scored: {_count(tokens, 'token')}{reward}."


def _lease(event: Event) -> str:
    again = f", attempt {event['attempt']}" if event.get("attempt", 1) > 1 else ""
    return (
        f"{short_name(event['engine'])} leased group {event['group']} at version {event['version']}, "
        f"to be trained by step {event['deadline']}{again}."
    )


def _drop(event: Event) -> str:
    if event["reason"] == NO_SIGNAL:
        return (
            f"Group {event['group']} was filtered: all its rewards were {event['reward']:.3g}; "
            f"{_count(event['wasted_tokens'], 'token')} wasted."
        )
    detail = f" ({event['detail']})" if event.get("detail") else ""
    return (
        f"Group {event['group']} was dropped: {event['reason']}{detail}; "
        f"{_count(event.get('wasted_tokens', 0), 'token')} wasted."
    )


def _claim(event: Event) -> str:
    untaken = event.get("untaken", ())
    back = f"; {_count(untaken, 'group')} of an unfinished step went back" if untaken else ""
    return f"A trainer claimed the run under epoch {event['epoch']}{back}."


def _resume(event: Event) -> str:
    if event["continued"]:
        return f"The trainer continues from version {event['version']}."
    return (
        f"The run was rewound to version {event['version']}; "
        f"{_count(event.get('waiting', ()), 'group')} will be generated again."
    )


def _rebuild(event: Event) -> str:
    return (
        f"The ledger had lost its writes after event {event['after']} "
        f"and was rebuilt at version {event['version']}."
    )


_Rule = tuple[str, str, Callable[[Event], str]]

_RULES: dict[str, _Rule] = {
    "create": ("run", "good", lambda e: f"The run was created: {_count(e['steps'], 'step')}, {_bound(e)}."),
    "steps": ("run", "info", lambda e: f"The run's length is now {_count(e['steps'], 'step')}."),
    "claim": ("run", "info", _claim),
    "resume": ("run", "info", _resume),
    "rebuild": ("run", "bad", _rebuild),
    "bound_pending": ("run", "warn", lambda e: f"A new bound waits until rule F holds with it: {_bound(e)}."),
    "bound": ("run", "info", lambda e: f"The bound in force: {_bound(e)}."),
    "drain": (
        "run",
        "warn",
        lambda e: "Leasing stopped: the run drains." if e["on"] else "Leases are granted again.",
    ),
    "checkpoint": ("run", "good", lambda e: f"A checkpoint covers the steps before version {e['version']}."),
    "halt": ("run", "bad", lambda e: f"Leasing halted: {describe_halt(e['reason'])}."),
    "unhalt": ("run", "good", lambda e: f"Leases are granted again after the halt for {e['reason']}."),
    "applied": ("versions", "info", lambda e: f"{short_name(e['engine'])} serves version {e['version']}."),
    "publish": ("versions", "info", lambda e: f"Version {e['version']} was published without a step."),
    "commit": (
        "versions",
        "good",
        lambda e: f"Step {e['step']} trained {_count(e['groups'], 'group')}: version {e['version']}.",
    ),
    "expire": ("losses", "warn", lambda e: f"The lease of group {e['group']} expired."),
    "release": (
        "losses",
        "warn",
        lambda e: f"Group {e['group']} was handed back to be generated again: {e['reason']}.",
    ),
    "lost": (
        "losses",
        "bad",
        lambda e: f"The record of group {e['group']} was lost; it will be generated again.",
    ),
    "drop": ("losses", "warn", _drop),
    "lease": ("groups", "info", _lease),
    "extend": ("groups", "info", lambda e: f"The expired lease of group {e['group']} was extended."),
    "accept": ("groups", "info", _accept),
    "take": ("groups", "info", lambda e: f"Step {e['step']} took {_count(e['groups'], 'group')}."),
}

TOPICS = ("run", "versions", "losses", "groups")
"""What events are about, rarest first: the run as a whole, weight versions, lost work, single groups."""


def sentence_of(event: Event) -> Sentence | None:
    """Return the sentence of an event; None if it lacks its number. An unknown event is named as it is."""
    kind, seq, time_ms = event.get("event"), event.get("seq"), event.get("time_ms")
    if not isinstance(kind, str) or not isinstance(seq, int) or not isinstance(time_ms, int):
        return None
    topic, level, write = _RULES.get(kind, ("run", "info", lambda _: f"Event {kind}."))
    try:
        text = write(event)
    except (KeyError, TypeError, ValueError, AttributeError):  # a damaged line, or one of another release
        text = f"Event {kind} lacks some of its fields."
    return Sentence(seq, time_ms, kind, topic, level, text[:400])
