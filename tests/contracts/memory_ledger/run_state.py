"""Holds the state of a run in memory: groups, counters, event log, and operations that transitions share.

`protocol.lifecycle` decides which transition is legal, and `protocol.staleness` whether rule F holds; this
module repeats neither.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from protocol.errors import Reason, Refused
from protocol.lifecycle import ACTIVE, NO_SIGNAL, Event, GroupState, after
from protocol.staleness import Bound, admits, holds
from services.ledger.event_log.events import (
    BoundEvent,
    DropEvent,
    ExpireEvent,
    HaltEvent,
    LedgerEvent,
    LostEvent,
    ReleaseEvent,
    UnhaltEvent,
)
from services.ledger.interface import Lease, LedgerStatus, Peer, RunSpec, StepRecord, TakenBatch, TakenGroup
from tests.contracts.memory_ledger.run_clock import RunClock

WAITS_MS, BUSIER = 5000, 1.2
"""As `lease` of the interface says."""


@dataclass(slots=True)
class Group:
    """One group; fields not described here are as in the interface's `Lease` and `TakenGroup`."""

    group: int
    state: GroupState = GroupState.WAITING
    token: str = ""
    previous: str = ""
    """Token under which it was last released or lost."""
    release_reason: str = ""
    """Why it was released; `lost` if its record was lost."""
    holder: str = ""
    deadline: int = 0
    max_staleness: int = 0
    version: int = 0
    attempt: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    request: str = ""
    """Lease request that was granted it, while it is LEASED."""
    expires_ms: int = 0
    expired: bool = False
    """Whether the lease ran out and gave up its place in rule F."""
    step: int = -1
    """Step in which it was trained."""

    def taken(self) -> TakenGroup:
        """Return the group as a batch lists it."""
        return TakenGroup(
            self.group, self.token, self.deadline, self.max_staleness, self.version, dict(self.counts)
        )


@dataclass(slots=True)
class RunState:
    """All that the ledger holds of one run."""

    spec: RunSpec
    clock: Callable[[], int]
    """The run's clock, in milliseconds."""
    bound: Bound
    pending: Bound | None = None
    version: int = 0
    epoch: str = ""
    epochs: set[str] = field(default_factory=set)
    lineage: set[str] = field(default_factory=set)
    resumed: tuple[str, int, int, bool] = ("", -1, 0, False)
    """Epoch, version, digest and answer of the last resume."""
    digest: int | None = None
    """Digest of the weights of `version`; None if no trainer has stated it."""
    running: TakenBatch | None = None
    unreported_drops: list[int] = field(default_factory=list)
    """Groups that takes have dropped and no batch has reported yet."""
    checkpoint: int = 0
    issued: int = 0
    trained: int = 0
    dropped: int = 0
    wasted_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    wasted_by_reason: Counter[str] = field(default_factory=Counter)
    filtered: int = 0
    """Groups without signal that were dropped since the last commit, or since a halt ended."""
    outcomes: deque[str] = field(default_factory=deque)
    halted: str = ""
    draining: bool = False
    groups: dict[int, Group] = field(default_factory=dict)
    steps: dict[int, StepRecord] = field(default_factory=dict)
    step_reports: dict[int, bytes] = field(default_factory=dict)
    manifest: bytes | None = None
    published: int = -1
    """Version of `manifest`."""
    engines: dict[str, tuple[str, int]] = field(default_factory=dict)
    waits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Engine -> groups and time of its last lease request, if that found no room."""
    requests: dict[str, Lease] = field(default_factory=dict)
    """Lease request -> the lease that it was granted, while the group is LEASED by it."""
    log: deque[LedgerEvent] = field(default_factory=deque)
    """Events that are not archived, oldest first."""
    sequence: int = 0
    """Number of the last event."""
    archived: int = 0
    """Number of the last archived event."""

    def append(self, event: LedgerEvent) -> None:
        """Append an event to the log, with the next number and the wall clock's time.

        A run whose clock was given has no other one.
        """
        self.sequence += 1
        time_ms = self.clock.wall() if isinstance(self.clock, RunClock) else self.clock()
        self.log.append(msgspec.structs.replace(event, seq=self.sequence, time_ms=time_ms))

    def check_room(self, engine: str, groups: int, version: int, due: int) -> None:
        """Refuse a lease that rule F has no room for, or a worker with fewer groups waits for."""
        try:
            if not admits(self.slot_deadlines(), due, self.next_step(), self.bound):
                raise Refused(Reason.BOUND, f"no room for deadline {due} at step {self.next_step()}")
            for other, (its_groups, at) in self.waits.items():
                epoch, its_version = self.engines.get(other, ("", -1))
                waits = epoch in self.lineage and its_version >= version and self.clock() - at <= WAITS_MS
                if waits and groups > BUSIER * its_groups:
                    raise Refused(Reason.BUSIER, f"{other} waits with fewer groups")
        except Refused:
            if groups >= 0:
                self.waits[engine] = groups, self.clock()
            raise
        self.waits.pop(engine, None)

    def next_step(self) -> int:
        """Return N of rule F."""
        return self.version + (self.running is not None)

    def of(self, *states: GroupState) -> list[Group]:
        """Return the groups in these states, in order of id."""
        return sorted(
            (group for group in self.groups.values() if group.state in states), key=lambda group: group.group
        )

    def live(self) -> list[Group]:
        """Return the leased groups that hold a place in rule F."""
        return [group for group in self.of(GroupState.LEASED) if not group.expired]

    def scored(self) -> list[Group]:
        """Return the SCORED groups, earliest deadline first."""
        return sorted(self.of(GroupState.SCORED), key=lambda group: (group.deadline, group.group))

    def leasable(self) -> list[Group]:
        """Return the groups to lease before a new one: WAITING ones, then expired leases."""
        return self.of(GroupState.WAITING) + [group for group in self.of(GroupState.LEASED) if group.expired]

    def exhausted(self) -> bool:
        """Return whether no new prompt is left."""
        return self.spec.prompts is not None and self.issued >= self.spec.prompts

    def slot_deadlines(self) -> list[int]:
        """Return the deadlines of all groups that hold a place in rule F."""
        return [group.deadline for group in (*self.live(), *self.of(GroupState.SCORED))]

    def room_for(self, deadlines: Iterable[int]) -> bool:
        """Return whether rule F holds with groups of these deadlines added."""
        return holds([*self.slot_deadlines(), *deadlines], self.next_step(), self.bound)

    def expire_leases(self) -> None:
        """Free the place in rule F of every lease that has run out."""
        now = self.clock()
        self._expire(lambda group: group.expires_ms <= now)

    def end_held(self, holder: str, *, refuted: bool) -> None:
        """Free the place in rule F of every lease of a holder; release the groups of one that is refuted."""
        if not refuted:
            self._expire(lambda group: group.holder == holder)
            return
        live = sorted(self.live(), key=lambda group: (group.expires_ms, group.group))
        expired = [group for group in self.of(GroupState.LEASED) if group.expired]
        for group in [*live, *sorted(expired, key=lambda group: group.group)]:
            if group.holder == holder:
                self.hand_back(group, Event.RELEASE, "refuted")

    def hand_back(self, group: Group, event: Event, reason: str) -> None:
        """Make a group WAITING that is released or lost."""
        token = group.token
        self.transition(group, event)
        group.previous, group.release_reason = token, reason
        if event is Event.RELEASE:
            self.append(ReleaseEvent(group=group.group, token=token, reason=reason))
        else:
            self.append(LostEvent(group=group.group, token=token))
        self.apply_pending()

    def _expire(self, ends: Callable[[Group], bool]) -> None:
        for group in sorted(self.live(), key=lambda group: (group.expires_ms, group.group)):
            if ends(group):
                group.expired = True
                self.append(ExpireEvent(group=group.group))

    def apply_pending(self) -> bool:
        """Put a pending bound in force if rule F allows it, and return whether none is pending.

        Rule F has to hold with it now, and if the running step were untaken, now or later.
        """
        if self.pending is None:
            return True
        if not holds(self.slot_deadlines(), self.next_step(), self.pending):
            return False
        taken = [group.deadline for group in self.of(GroupState.TAKEN)]
        if len(taken) > self.pending.groups_per_step or (
            taken and not holds([*self.slot_deadlines(), *taken], self.version, self.pending)
        ):
            return False
        self.bound, self.pending = self.pending, None
        self.append(bound_event(self.bound))
        return True

    def transition(self, group: Group, event: Event) -> None:
        """Move a group as the lifecycle table says; refuse WRONG_STATE if it has no such row."""
        state = after(group.state, event)
        if state is None:
            raise Refused(Reason.WRONG_STATE, f"group {group.group} is {group.state}")
        group.state = state
        if state is not GroupState.LEASED:
            self.requests.pop(group.request, None)
            group.request = ""
        if state is GroupState.WAITING:
            group.token, group.counts, group.step = "", {}, -1
        if event is not Event.EXTEND:
            group.expired = False

    def held(self, group: int, token: str, *, forgotten: Reason = Reason.NOT_HELD) -> Group:
        """Return the group if `token` is its current one.

        Refuses UNKNOWN_GROUP, NOT_HELD, and `forgotten` for a group that is finished and forgotten.
        """
        state = self.groups.get(group)
        if state is None:
            raise Refused(Reason.UNKNOWN_GROUP if group >= self.issued else forgotten, f"group {group}")
        if state.token != token:
            raise Refused(Reason.NOT_HELD, f"group {group} is not held by {token}")
        return state

    def has_ended(self, group: int) -> bool:
        """Return whether a group is DROPPED, or finished and forgotten."""
        found = self.groups.get(group)
        return group < self.issued if found is None else found.state is GroupState.DROPPED

    def drop(
        self,
        group: Group,
        reason: str,
        detail: str = "",
        wasted_tokens: int = 0,
        reward: float | None = None,
    ) -> None:
        """Drop a group, and halt the run if `reason` has too large a share of the recent drops."""
        wasted = max(wasted_tokens, sum(group.counts.values()))
        before = group.state
        self.transition(group, Event.DROP)
        self.dropped += 1
        self.wasted_tokens += wasted
        self.reasons[reason] += 1
        self.wasted_by_reason[reason] += wasted
        self.append(
            DropEvent(
                group=group.group,
                token=group.token,
                reason=reason,
                detail=detail,
                wasted_tokens=wasted,
                from_state=before,
                reward=reward,
            )
        )
        self.finish(reason)
        window, share = self.spec.drop_window, self.spec.drop_share
        too_many = len(self.outcomes) >= window and self.outcomes.count(reason) >= share * window
        if too_many and reason != NO_SIGNAL:
            self.halt(reason)

    def filter(self, group: int, token: str, tokens: int, reward: float, max_batches: int) -> None:
        """Drop a leased group without signal, and halt the run at its limit; see `Ledger.filter`."""
        found = self.held(group, token, forgotten=Reason.DUPLICATE)
        if found.state is not GroupState.LEASED:
            return
        self.drop(found, NO_SIGNAL, wasted_tokens=tokens, reward=reward)
        self.filtered += 1
        if 0 < max_batches * self.bound.groups_per_step <= self.filtered:
            self.halt(NO_SIGNAL)
        self.apply_pending()

    def finish(self, outcome: str) -> None:
        """Record how a group ended: by a drop reason, or empty for trained."""
        self.outcomes.appendleft(outcome)
        while len(self.outcomes) > self.spec.drop_window:
            self.outcomes.pop()

    def halt(self, reason: str) -> None:
        """Stop granting leases; a run that is halted keeps its first reason."""
        if not self.halted:
            self.halted = reason
            self.append(HaltEvent(reason=reason))

    def unhalt(self) -> None:
        """Allow leases after a halt; drops, and attempts of WAITING and LEASED groups, are counted from 0."""
        self.append(UnhaltEvent(reason=self.halted))
        self.halted, self.filtered = "", 0
        self.outcomes.clear()
        for group in self.of(GroupState.WAITING, GroupState.LEASED):
            group.attempt = 0

    def fence(self, epoch: str) -> None:
        """Refuse an epoch that is not the current one."""
        if epoch != self.epoch:
            raise Refused(Reason.STALE_EPOCH, f"epoch {epoch} is not the current one, {self.epoch}")

    def status(self) -> LedgerStatus:
        """Return all counters."""
        states = Counter(group.state for group in self.groups.values() if group.state in ACTIVE)
        return LedgerStatus(
            version=self.version,
            epoch=self.epoch,
            sequence=self.sequence,
            bound=self.bound,
            pending=self.pending,
            steps=self.spec.steps,
            issued=self.issued,
            trained=self.trained,
            dropped=self.dropped,
            states={state: states[state] for state in GroupState if state in ACTIVE},
            dropped_by_reason=dict(self.reasons),
            wasted_tokens=self.wasted_tokens,
            halted=self.halted,
            draining=self.draining,
            engines=dict(self.engines),
            wasted_by_reason=dict(self.wasted_by_reason),
            fingerprint=self.spec.fingerprint,
        )


@dataclass(slots=True)
class ProcessRegistry:
    """Processes of the run, and the time at which each counts as dead."""

    clock: Callable[[], int]
    """Milliseconds."""
    entries: dict[str, tuple[int, Peer]] = field(default_factory=dict)
    """Incarnation -> end of its time-to-live (ms of `clock`), and the process."""
    refuted: set[str] = field(default_factory=set)
    """Engines that an audit refutes."""

    def forget(self, incarnation: str, *, refuted: bool) -> None:
        """Remove a process; with `refuted` remember that an audit refutes the engine."""
        self.entries.pop(incarnation, None)
        self.refuted = (self.refuted - {incarnation}) | ({incarnation} if refuted else set())

    def refuse_refuted(self, engine: str) -> None:
        """Refuse an engine that an audit refutes."""
        if engine in self.refuted:
            raise Refused(Reason.REFUTED, f"an audit refutes {engine}")

    def live(self) -> list[Peer]:
        """Remove dead processes and return the others in order of incarnation."""
        now = self.clock()
        self.entries = {name: entry for name, entry in self.entries.items() if entry[0] > now}
        return [self.entries[name][1] for name in sorted(self.entries)]


def bound_event(bound: Bound) -> BoundEvent:
    """Return the event of a bound that is in force."""
    return BoundEvent(
        max_staleness=bound.max_staleness, groups_per_step=bound.groups_per_step, policy=bound.policy
    )
