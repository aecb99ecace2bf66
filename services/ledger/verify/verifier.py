"""Proves a run from its event log alone: no group trained twice, none lost, no token over the bound.

The log is replayed through `protocol.lifecycle`'s table and `protocol.staleness`'s rules. A mismatch is a
violation that names the event and the group. `services/ledger/event_log/events.py` defines the events.
"""

from dataclasses import dataclass, field
from pathlib import Path

from protocol.lifecycle import Event, GroupState
from protocol.staleness import Bound, deadline
from services.ledger.event_log.events import (
    AcceptEvent,
    AppliedEvent,
    BoundEvent,
    CheckpointEvent,
    ClaimEvent,
    CommitEvent,
    CreateEvent,
    DropEvent,
    ExpireEvent,
    ExtendEvent,
    LeaseEvent,
    LedgerEvent,
    LostEvent,
    MalformedEvent,
    RebuildEvent,
    ReleaseEvent,
    ResumeEvent,
    TakeEvent,
    UnknownEvent,
    decode_line,
    event_bound,
)
from services.ledger.event_log.hash_chain import Chain
from services.ledger.verify.rebuild_check import check_rebuild
from services.ledger.verify.replay_state import ReplayedGroup, ReplayState
from services.ledger.verify.rules import Rules

MAX_VIOLATIONS = 1000
"""Maximum number of violations to record."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Counters and violations found by `verify`.

    Trained groups are the groups on the path to the committed version.
    """

    issued: int
    """Number of groups ever leased."""
    trained: int
    """Number of groups that are TRAINED at the end of the log."""
    dropped: int
    """Number of groups that are DROPPED."""
    active: int
    """Number of groups in any other state."""
    max_lag: int
    """Largest lag of a trained token, in versions."""
    bound: int
    """Largest bound recorded with the lease of a trained group, in versions."""
    steps: int
    """Number of committed steps on the path to the committed version."""
    violations: list[str] = field(default_factory=list)
    """Contradictions to the lifecycle or the bound; each message names its event."""

    @property
    def ok(self) -> bool:
        """Whether there are no violations."""
        return not self.violations


def verify(path: Path) -> AuditResult:
    """Check the log at `path`; a torn last line is skipped.

    Raises:
        OSError: the log cannot be read.
    """
    chain, verifier = Chain(path), Verifier()
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            intact = chain.follows(line)
            verifier.apply(decode_line(line))
            if not intact:
                verifier.violation("the line is not as it was archived, or does not follow the one before it")
    return verifier.result(chain.missing())


class Verifier:
    """Replays a log: pass every event to `apply`, oldest first, then call `result`."""

    def __init__(self) -> None:
        self._violations: list[str] = []
        self._sequence = 0
        """Number of the last event."""
        self._label = ""
        """Label of the current event in violations."""
        self._state = ReplayState(self.violation)
        self._rules = Rules(self._state)

    def violation(self, message: str) -> None:
        """Record that the current event contradicts earlier events."""
        if len(self._violations) < MAX_VIOLATIONS:
            self._violations.append(f"{self._label}: {message}")

    def apply(self, event: LedgerEvent) -> None:
        """Replay one event."""
        self._sequence += 1
        self._label = f"seq {self._sequence}"
        if isinstance(event, MalformedEvent) and not event.is_object:
            return self.violation(event.problem)
        if event.seq != self._sequence:
            if not isinstance(event, RebuildEvent) or event.after != self._sequence - 1:
                self.violation(f"the log continues at {event.seq}: a gap")
            self._sequence = event.seq or self._sequence
        self._label = f"seq {self._sequence} ({event.kind})"
        if isinstance(event, UnknownEvent):
            return self.violation("unknown event")
        if isinstance(event, MalformedEvent):
            return self.violation(event.problem)
        if self._sequence == 1 and not isinstance(event, CreateEvent | RebuildEvent):
            self.violation(f"the log begins with {event.kind}: what comes before it is missing")
        try:
            self._rules.before(event)
            self._replay(event)
            self._rules.after(event)
        except ValueError as error:  # a number has too many digits to be printed
            self.violation(f"malformed: {error}")
        return None

    def _replay(self, event: LedgerEvent) -> None:
        state = self._state
        match event:
            case CreateEvent():
                if self._sequence != 1:
                    self.violation("the run is created twice")
                state.bound = event_bound(event)
            case BoundEvent():
                state.bound = event_bound(event)
            case AppliedEvent():
                self._applied(event)
            case LeaseEvent():
                self._lease(event)
            case ExpireEvent():
                self._expire(event)
            case ExtendEvent():
                state.transition(event.group, Event.EXTEND, event.token)
            case ReleaseEvent():
                state.transition(event.group, Event.RELEASE, event.token)
            case AcceptEvent():
                group = state.transition(event.group, Event.ACCEPT, event.token)
                group.counts = event.counts
                group.count_transition("accept", 1)
            case LostEvent():
                state.transition(event.group, Event.LOST, event.token)
            case DropEvent():
                state.transition(event.group, Event.DROP, event.token)
                state.dropped += 1
            case ClaimEvent():
                self._claim(event)
            case ResumeEvent():
                self._resume(event)
            case TakeEvent():
                self._take(event)
            case CommitEvent():
                self._commit(event)
            case CheckpointEvent():
                state.checkpoint = event.version
            case RebuildEvent():
                check_rebuild(state, event)

    def _applied(self, event: AppliedEvent) -> None:
        if event.version > self._state.version:
            self.violation(f"engine {event.engine} serves version {event.version}, which is not committed")
        self._state.engines[event.engine] = (event.epoch, event.version)

    def _lease(self, event: LeaseEvent) -> None:
        state, number = self._state, event.group
        known = state.groups.get(number)
        if known is None and number != len(state.groups):
            self.violation(f"group {number} is new, but {len(state.groups)} is the next one")
        elif known is not None and known.state is GroupState.LEASED and not known.expired:
            self.violation(f"group {number}: leased again before its lease expired")
        group = state.groups.setdefault(number, ReplayedGroup())
        group.token, group.deadline, group.bound = event.token, event.deadline, event.bound
        state.transition(number, Event.LEASE)
        if event.deadline != deadline(event.version, event.bound):
            expected = f"version {event.version} + bound {event.bound}"
            self.violation(f"group {number}: deadline {event.deadline} is not {expected}")
        bound = Bound(event.bound, event.groups_per_step, event.policy)
        if bound != state.bound:
            self.violation(f"group {number}: leased under {bound}, but {state.bound} is in force")
        if state.engines.get(event.engine) != (event.epoch, event.version):
            self.violation(
                f"group {number}: engine {event.engine} did not acknowledge version {event.version}"
            )
        if event.deadline < state.next_step():
            self.violation(f"group {number}: leased when it is late already")

    def _expire(self, event: ExpireEvent) -> None:
        group = self._state.group(event.group)
        if group.state is not GroupState.LEASED or group.expired:
            self.violation(f"group {event.group}: no live lease to expire")
        group.expired = True
        self._state.rule_f_deadlines.pop(event.group, None)

    def _claim(self, event: ClaimEvent) -> None:
        state = self._state
        state.epoch = event.epoch
        if sorted(event.untaken) != sorted(state.running or []):
            self.violation(f"untaken {event.untaken}, but {state.running} were taken")
        for number in event.untaken:
            state.transition(number, Event.UNTAKE).count_transition("take", -1)
        state.running = None

    def _resume(self, event: ResumeEvent) -> None:
        state, version = self._state, event.version
        state.check_epoch(event.epoch)
        if event.continued:
            if version != state.version:
                self.violation(f"continues at version {version}, but {state.version} is committed")
            return
        if not state.checkpoint <= version <= state.version:
            self.violation(
                f"rewound to version {version}, which is not in {state.checkpoint}..{state.version}"
            )
        for number in event.waiting:
            state.trained -= state.group(number).state is GroupState.TRAINED
            state.transition(number, Event.REWIND)
        state.version = version

    def _take(self, event: TakeEvent) -> None:
        state = self._state
        state.check_epoch(event.epoch)
        if state.running is not None or event.step != state.version:
            self.violation(f"step {event.step} is taken at version {state.version} while {state.running} run")
        state.running = list(event.groups)
        for number in event.groups:
            state.transition(number, Event.TAKE).count_transition("take", 1)

    def _commit(self, event: CommitEvent) -> None:
        state, step = self._state, event.step
        state.check_epoch(event.epoch)
        if event.version != state.version + 1 or step != state.version:
            self.violation(
                f"version {event.version} from step {step} does not follow version {state.version}"
            )
        if sorted(event.groups) != sorted(state.running or []):
            self.violation(f"groups {sorted(event.groups)} are committed, {state.running} were taken")
        for number, counts in event.groups.items():
            state.train(number, step, counts)
        state.version, state.running = step + 1, None
        counted = (*state.counters()[1:], len(state.groups) - state.trained - state.dropped)
        stated = (event.issued, event.trained, event.dropped, event.active)
        if stated != counted or stated[0] != sum(stated[1:]):
            self.violation(
                f"issued, trained, dropped, active are {stated} in the event and {counted} in the log"
            )

    def result(self, gap: str | None = None) -> AuditResult:
        """Return the counters at the end of the log; `gap` describes events missing at the end."""
        state = self._state
        trained = [group for _, group in state.groups_in_state(GroupState.TRAINED)]
        active = state.active()
        self._label = "end"
        if gap:
            self.violation(gap)
        if len(state.groups) != len(trained) + state.dropped + active:
            self.violation(
                f"{len(state.groups)} groups issued, "
                f"but {len(trained)} trained, {state.dropped} dropped and {active} active"
            )
        return AuditResult(
            issued=len(state.groups),
            trained=len(trained),
            dropped=state.dropped,
            active=active,
            max_lag=max((group.trained_lag for group in trained), default=0),
            bound=max((group.bound for group in trained), default=0),
            steps=len({group.step for group in trained}),
            violations=list(self._violations),
        )
