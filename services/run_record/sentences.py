"""Formats ledger events as English sentences."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from protocol.lifecycle import NO_SIGNAL
from services.ledger.event_log.events import (
    AcceptEvent,
    AppliedEvent,
    BoundEvent,
    BoundPendingEvent,
    CheckpointEvent,
    ClaimEvent,
    CommitEvent,
    CreateEvent,
    DrainEvent,
    DropEvent,
    ExpireEvent,
    ExtendEvent,
    HaltEvent,
    LeaseEvent,
    LedgerEvent,
    LostEvent,
    MalformedEvent,
    PublishEvent,
    RebuildEvent,
    ReleaseEvent,
    ResumeEvent,
    StepsEvent,
    TakeEvent,
    UnhaltEvent,
    UnknownEvent,
)
from services.run_record.halts import describe_halt

E = TypeVar("E", bound=LedgerEvent)


class Sentence(NamedTuple):
    """One event, formatted for the page."""

    seq: int
    """Number of the event."""
    time_ms: int
    """Unix time of the ledger's clock, ms."""
    kind: str
    """Name of the event."""
    topic: str
    """One of `TOPICS`."""
    level: str
    """info, good, warn or bad."""
    text: str


def short_name(incarnation: str) -> str:
    """Return the name of a process without the random part of its incarnation."""
    name, dot, _ = incarnation.rpartition(".")
    return name if dot else incarnation


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bound(event: CreateEvent | BoundPendingEvent | BoundEvent) -> str:
    return (
        f"max_staleness {event.max_staleness}, {_count(event.groups_per_step, 'group')} per step, "
        f"policy {event.policy}"
    )


def _accept(event: AcceptEvent) -> str:
    reward = "" if event.reward is None else f", mean reward {event.reward:.3g}"
    return f"Group {event.group} was scored: {_count(sum(event.counts.values()), 'token')}{reward}."


def _lease(event: LeaseEvent) -> str:
    again = f", attempt {event.attempt}" if event.attempt > 1 else ""
    return (
        f"{short_name(event.engine)} leased group {event.group} at version {event.version}, "
        f"to be trained by step {event.deadline}{again}."
    )


def _drop(event: DropEvent) -> str:
    wasted = f"{_count(event.wasted_tokens, 'token')} wasted"
    if event.reason == NO_SIGNAL and event.reward is not None:
        return f"Group {event.group} was filtered: its mean reward was {event.reward:.3g}; {wasted}."
    detail = f" ({event.detail})" if event.detail else ""
    return f"Group {event.group} was dropped: {event.reason}{detail}; {wasted}."


def _claim(event: ClaimEvent) -> str:
    groups = len(event.untaken)
    back = f"; {_count(groups, 'group')} of an unfinished step went back" if groups else ""
    return f"A trainer claimed the run under epoch {event.epoch}{back}."


def _resume(event: ResumeEvent) -> str:
    if event.continued:
        return f"The trainer continues from version {event.version}."
    again = _count(len(event.waiting), "group")
    return f"The run was rewound to version {event.version}; {again} will be generated again."


def _rebuild(event: RebuildEvent) -> str:
    return (
        f"The ledger had lost its writes after event {event.after} "
        f"and was rebuilt at version {event.version}."
    )


class _Rule(NamedTuple):
    topic: str
    level: str
    write: Callable[[Any], str]


def _rule(
    kind: type[E], topic: str, level: str, write: Callable[[E], str]
) -> tuple[type[LedgerEvent], _Rule]:
    """Return a row of `_RULES`; its signature gives each lambda's event a type."""
    return kind, _Rule(topic, level, write)


_RULES: Mapping[type[LedgerEvent], _Rule] = dict(
    (
        _rule(
            CreateEvent,
            "run",
            "good",
            lambda e: f"The run was created: {_count(e.steps, 'step')}, {_bound(e)}.",
        ),
        _rule(StepsEvent, "run", "info", lambda e: f"The run's length is now {_count(e.steps, 'step')}."),
        _rule(ClaimEvent, "run", "info", _claim),
        _rule(ResumeEvent, "run", "info", _resume),
        _rule(RebuildEvent, "run", "bad", _rebuild),
        _rule(
            BoundPendingEvent,
            "run",
            "warn",
            lambda e: f"A new bound waits until rule F holds with it: {_bound(e)}.",
        ),
        _rule(BoundEvent, "run", "info", lambda e: f"The bound in force: {_bound(e)}."),
        _rule(
            DrainEvent,
            "run",
            "warn",
            lambda e: "Leasing stopped: the run drains." if e.on else "Leases are granted again.",
        ),
        _rule(
            CheckpointEvent,
            "run",
            "good",
            lambda e: f"A checkpoint covers the steps before version {e.version}.",
        ),
        _rule(HaltEvent, "run", "bad", lambda e: f"Leasing halted: {describe_halt(e.reason)}."),
        _rule(
            UnhaltEvent, "run", "good", lambda e: f"Leases are granted again after the halt for {e.reason}."
        ),
        _rule(
            AppliedEvent, "versions", "info", lambda e: f"{short_name(e.engine)} serves version {e.version}."
        ),
        _rule(
            PublishEvent, "versions", "info", lambda e: f"Version {e.version} was published without a step."
        ),
        _rule(
            CommitEvent,
            "versions",
            "good",
            lambda e: f"Step {e.step} trained {_count(len(e.groups), 'group')}: version {e.version}.",
        ),
        _rule(ExpireEvent, "losses", "warn", lambda e: f"The lease of group {e.group} expired."),
        _rule(
            ReleaseEvent,
            "losses",
            "warn",
            lambda e: f"Group {e.group} was handed back to be generated again: {e.reason}.",
        ),
        _rule(
            LostEvent,
            "losses",
            "bad",
            lambda e: f"The record of group {e.group} was lost; it will be generated again.",
        ),
        _rule(DropEvent, "losses", "warn", _drop),
        _rule(LeaseEvent, "groups", "info", _lease),
        _rule(ExtendEvent, "groups", "info", lambda e: f"The expired lease of group {e.group} was extended."),
        _rule(AcceptEvent, "groups", "info", _accept),
        _rule(TakeEvent, "groups", "info", lambda e: f"Step {e.step} took {_count(len(e.groups), 'group')}."),
        _rule(UnknownEvent, "run", "info", lambda e: f"Event {e.kind}."),
        _rule(MalformedEvent, "run", "warn", lambda e: f"Event {e.kind} lacks some of its fields."),
    )
)

TOPICS = ("run", "versions", "losses", "groups")
"""Topics of events, rarest first: the run as a whole, weight versions, lost work, single groups."""


def sentence_of(event: LedgerEvent) -> Sentence:
    """Return the sentence of an event; an unknown event is shown by its name."""
    rule = _RULES[type(event)]
    return Sentence(event.seq, event.time_ms, event.kind, rule.topic, rule.level, rule.write(event)[:400])
