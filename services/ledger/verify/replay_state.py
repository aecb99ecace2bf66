"""Holds the state of a run while `verify` replays its event log.

This package shares no code with `memory/` or `ledger_recovery/`, because it proves their results. It depends
only on `protocol.lifecycle` and `protocol.staleness`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protocol.lifecycle import ACTIVE, Event, GroupState, after
from protocol.staleness import Bound, holds, lag

_S = GroupState
_EXPECTED_TRANSITIONS = {"accept": 1, "take": 1, "commit": 1}
_TARGET_STATES = {Event.ACCEPT: _S.SCORED, Event.TAKE: _S.TAKEN, Event.COMMIT: _S.TRAINED}
"""Target state of a forbidden transition, so that one fault is reported only once."""


@dataclass(slots=True)
class ReplayedGroup:
    """A group as described by the log."""

    state: GroupState = GroupState.WAITING
    token: str = ""
    """Token of the last lease; empty while WAITING."""
    deadline: int = 0
    bound: int = 0
    """Bound of the last lease, in versions."""
    expired: bool = False
    """Whether the lease has expired, so that the group holds no place in rule F."""
    counts: dict[int, int] = field(default_factory=dict)
    """Number of accepted tokens by version; empty once trained."""
    transitions: dict[str, int] = field(default_factory=dict)
    """Number of accepts, takes and commits since the group last left WAITING."""
    step: int = -1
    """Step that trained the group; -1 before."""
    trained_lag: int = 0
    """Largest lag of the group's trained tokens, in versions."""

    def count_transition(self, name: str, increment: int) -> None:
        """Add `increment` to the count of an accept, a take or a commit."""
        self.transitions[name] = self.transitions.get(name, 0) + increment


class ReplayState:
    """State of the run after the replayed events. Contradictions are passed to `report`."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        """Called with each violation, without the label of its event."""
        self.groups: dict[int, ReplayedGroup] = {}
        """Every group that was ever leased."""
        self.rule_f_deadlines: dict[int, int] = {}
        """Group -> deadline, for groups that hold a place in rule F."""
        self.trained = 0
        self.dropped = 0
        self.version = 0
        """Committed version."""
        self.checkpoint = 0
        """Version of the last durable checkpoint."""
        self.epoch = ""
        """Epoch that holds the run."""
        self.running: list[int] | None = None
        """Groups of the running step."""
        self.bound = Bound()
        self.engines: dict[str, tuple[str, int]] = {}
        """Engine -> last acknowledged epoch and version."""

    def group(self, number: int) -> ReplayedGroup:
        """Return a group; report the group if it was never leased."""
        if number not in self.groups:
            self.report(f"group {number} was never leased")
        return self.groups.setdefault(number, ReplayedGroup())

    def issue(self, issued: int) -> None:
        """Add the groups below `issued` whose lease events were lost."""
        for number in range(len(self.groups), issued):
            self.groups.setdefault(number, ReplayedGroup())

    def transition(self, number: int, event: Event, token: str | None = None) -> ReplayedGroup:
        """Move a group by the lifecycle table; report a forbidden transition or a wrong token."""
        group = self.group(number)
        if token is not None and token != group.token:
            self.report(f"group {number}: token {token} is not the current one, {group.token}")
        state = after(group.state, event)
        if state is None:
            self.report(f"group {number}: {event} from {group.state} is not in the table")
            state = _TARGET_STATES.get(event, group.state)
        if event is Event.LEASE or (event is Event.EXTEND and state is _S.LEASED):
            group.expired = False
        self.set_state(number, state)
        return group

    def set_state(self, number: int, state: GroupState) -> None:
        """Set a group's state, and add or remove its place in rule F."""
        group = self.groups[number]
        group.state = state
        if state is _S.WAITING:
            group.token, group.counts, group.transitions, group.step = "", {}, {}, -1
        if state is _S.SCORED or (state is _S.LEASED and not group.expired):
            self.rule_f_deadlines[number] = group.deadline
        else:
            self.rule_f_deadlines.pop(number, None)

    def train(self, number: int, step: int, counts: Mapping[int, int]) -> None:
        """Train one group of a commit; report tokens that are over the bound or were never accepted."""
        group = self.transition(number, Event.COMMIT)
        group.count_transition("commit", 1)
        self.trained += 1
        group.step = step
        if group.transitions != _EXPECTED_TRANSITIONS:
            self.report(f"group {number}: {group.transitions} on the path to this commit, not one of each")
        group.trained_lag = max((lag(step, version) for version, n in counts.items() if n), default=0)
        if group.trained_lag > group.bound:
            over = f"lag {group.trained_lag} was trained, over the bound {group.bound}"
            self.report(f"group {number}: a token of {over}")
        excess = [version for version, n in counts.items() if n > group.counts.get(version, 0)]
        if excess:
            self.report(f"group {number}: more tokens of versions {excess} trained than accepted")

    def next_step(self) -> int:
        """Return the next step, N in rule F."""
        return self.version + (self.running is not None)

    def check_rule_f(self, subject: str) -> None:
        """Report a violation of rule F after an event about `subject`."""
        if not holds(self.rule_f_deadlines.values(), self.next_step(), self.bound):
            self.report(f"{subject}: rule F does not hold at step {self.next_step()}")

    def check_epoch(self, epoch: str) -> None:
        """Report an event under an epoch that does not hold the run."""
        if epoch != self.epoch:
            self.report(f"epoch {epoch} acts, but {self.epoch} holds the run")

    def counters(self) -> tuple[int, int, int, int]:
        """Return the version and the numbers of groups issued, trained and dropped."""
        return self.version, len(self.groups), self.trained, self.dropped

    def groups_in_state(self, *states: GroupState) -> list[tuple[int, ReplayedGroup]]:
        """Return the groups in any of `states`, with their numbers."""
        return [(number, group) for number, group in self.groups.items() if group.state in states]

    def active(self) -> int:
        """Return the number of groups that are neither TRAINED nor DROPPED."""
        return sum(group.state in ACTIVE for group in self.groups.values())


def sampled_versions(counts: Mapping[int, int]) -> list[int]:
    """Return the versions that have at least one token."""
    return [version for version, n in counts.items() if n]
