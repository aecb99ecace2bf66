"""Proof of a run from its event log alone: nothing trained twice, nothing lost, no token over the bound.

The log is replayed through `protocol.lifecycle`'s table and `protocol.staleness`'s rules; what does not fit
is a violation that names the event and the group. `services/ledger/event_log/archiver.py` lists the events.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from protocol.lifecycle import ACTIVE, Event, GroupState, after
from protocol.staleness import Bound, Policy, deadline, lag
from services.ledger.event_log.hash_chain import Chain
from services.ledger.verify.rebuild_check import check_rebuild
from services.ledger.verify.replay_state import ReplayedGroup
from services.ledger.verify.result import AuditResult
from services.ledger.verify.rules import Rules

_S = GroupState
MOST_VIOLATIONS = 1000
INTEGERS = (
    "time_ms", "group", "step", "version", "deadline", "bound", "attempt", "max_staleness", "groups_per_step", "issued", "trained",
    "dropped", "active", "after", "wasted_tokens", "steps", "prompts",
)  # fmt: skip
"""Fields that are whole numbers wherever they stand."""


def verify(path: Path) -> AuditResult:
    """Check the log at `path`; a torn last line is left out.

    Raises:
        OSError: if it cannot be read.
    """
    chain, replay = Chain(path), Verifier()
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            sound = chain.follows(line)
            replay.step(_event(line))
            if not sound:
                replay.violation("the line is not as it was archived, or does not follow the one before it")
    return replay.result(chain.missing())


def verify_events(events: Iterable[Mapping[str, Any] | None]) -> AuditResult:
    """Check events in order; None stands for a line that is not an event."""
    replay = Verifier()
    for event in events:
        replay.step(event)
    return replay.result()


def _event(line: bytes) -> Mapping[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


class Verifier:
    """The run as the log tells it, so far: give it every event by `step`, then ask for the `result`."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.groups: dict[int, ReplayedGroup] = {}
        self.holding: dict[int, int] = {}
        """Group -> deadline, of groups that hold a place in rule F."""
        self.trained = 0
        self.dropped = 0
        self.seq = 0
        self.version = 0
        self.checkpoint = 0
        self.epoch = ""
        self.running: list[int] | None = None
        self.bound = Bound()
        self.engines: dict[str, tuple[str, int]] = {}
        self.rules = Rules(self)
        self.now = ""
        """Label of the present event, for violations."""

    def step(self, event: Mapping[str, Any] | None) -> None:
        """Take one event in."""
        self.seq += 1
        self.now = f"seq {self.seq}"
        if event is None:
            return self.violation("the line is not an event")
        if event.get("seq") != self.seq:
            if event.get("event") != "rebuild" or event.get("after") != self.seq - 1:
                self.violation(f"the log goes on at {event.get('seq')}: a gap")
            self.seq = event["seq"] if isinstance(event.get("seq"), int) else self.seq
        self.now = f"seq {self.seq} ({(kind := event.get('event'))})"
        handler: Callable[[Mapping[str, Any]], None] | None = getattr(self, f"on_{kind}", None)
        if handler is None and kind not in ("steps", "halt", "unhalt", "publish", "bound_pending", "drain"):
            return self.violation("unknown event")
        odd = [name for name in INTEGERS if name in event and type(event[name]) is not int]
        if odd:
            return self.violation(f"malformed: {odd[0]} is {event[odd[0]]!r}, not a whole number")
        try:
            self.rules.before(kind, event)
            if handler is not None:
                handler(event)
            self.rules.after(kind, event)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            self.violation(f"malformed: {type(error).__name__} {error}")

    def violation(self, what: str) -> None:
        if len(self.violations) < MOST_VIOLATIONS:
            self.violations.append(f"{self.now}: {what}")

    def move(self, number: int, event: Event, token: str | None = None) -> ReplayedGroup:
        """Follow the lifecycle table; the group moves on even if the table forbids it, so that one fault is
        told once."""
        if number not in self.groups:
            self.violation(f"group {number} was never leased")
        group = self.group(number)
        if token is not None and token != group.token:
            self.violation(f"group {number}: token {token} is not the current one, {group.token}")
        state = after(group.state, event)
        if state is None:
            self.violation(f"group {number}: {event} from {group.state} is not in the table")
        state = state or {Event.ACCEPT: _S.SCORED, Event.TAKE: _S.TAKEN, Event.COMMIT: _S.TRAINED}.get(
            event, group.state
        )
        if event is Event.LEASE or (event is Event.EXTEND and state is _S.LEASED):
            group.expired = False
        self.place(number, state)
        return group

    def group(self, number: int) -> ReplayedGroup:
        """The group, made if the log has not named it."""
        return self.groups.setdefault(number, ReplayedGroup())

    def place(self, number: int, state: GroupState) -> None:
        """Bring a group into `state`, with or without a place in rule F."""
        group = self.groups[number]
        group.state = state
        if group.state is _S.WAITING:
            group.token, group.counts, group.passed, group.step = "", {}, {}, -1
        if group.state is _S.SCORED or (group.state is _S.LEASED and not group.expired):
            self.holding[number] = group.deadline
        else:
            self.holding.pop(number, None)

    def on_create(self, event: Mapping[str, Any]) -> None:
        if self.seq != 1:
            self.violation("the run is created twice")
        self.on_bound(event)

    def on_bound(self, event: Mapping[str, Any]) -> None:
        self.bound = Bound(event["max_staleness"], event["groups_per_step"], Policy(event["policy"]))

    def on_applied(self, event: Mapping[str, Any]) -> None:
        if event["version"] > self.version:
            self.violation(
                f"engine {event['engine']} serves version {event['version']}, which is not committed"
            )
        self.engines[event["engine"]] = (event["epoch"], event["version"])

    def on_lease(self, event: Mapping[str, Any]) -> None:
        number = event["group"]
        new = number not in self.groups
        if new:
            if number != len(self.groups):
                self.violation(f"group {number} is new, but {len(self.groups)} is the next one")
            self.groups[number] = ReplayedGroup()
        elif self.groups[number].state is _S.LEASED and not self.groups[number].expired:
            self.violation(f"group {number}: leased again before its lease expired")
        group = self.groups[number]
        group.token, group.deadline, group.bound = event["token"], event["deadline"], event["bound"]
        self.move(number, Event.LEASE)
        if group.deadline != deadline(event["version"], group.bound):
            self.violation(
                f"group {number}: deadline {group.deadline} is not version {event['version']} + bound {group.bound}"
            )
        bound = Bound(event["bound"], event["groups_per_step"], Policy(event["policy"]))
        if bound != self.bound:
            self.violation(f"group {number}: leased under {bound}, but {self.bound} is in force")
        if self.engines.get(event["engine"]) != (event["epoch"], event["version"]):
            self.violation(
                f"group {number}: engine {event['engine']} did not acknowledge version {event['version']}"
            )
        if group.deadline < self.version + (self.running is not None):
            self.violation(f"group {number}: leased when it is late already")

    def on_expire(self, event: Mapping[str, Any]) -> None:
        group = self.groups[event["group"]]
        if group.state is not _S.LEASED or group.expired:
            self.violation(f"group {event['group']}: no live lease to expire")
        group.expired = True
        self.holding.pop(event["group"], None)

    def on_extend(self, event: Mapping[str, Any]) -> None:
        self.move(event["group"], Event.EXTEND, event["token"])

    def on_release(self, event: Mapping[str, Any]) -> None:
        self.move(event["group"], Event.RELEASE, event["token"])

    def on_accept(self, event: Mapping[str, Any]) -> None:
        group = self.move(event["group"], Event.ACCEPT, event["token"])
        group.counts = {int(version): n for version, n in event["counts"].items()}
        self.count_transition(group, "accept", 1)

    def on_lost(self, event: Mapping[str, Any]) -> None:
        self.move(event["group"], Event.LOST, event["token"])

    def on_drop(self, event: Mapping[str, Any]) -> None:
        self.move(event["group"], Event.DROP, event["token"])
        self.dropped += 1

    def on_claim(self, event: Mapping[str, Any]) -> None:
        self.epoch = event["epoch"]
        untaken = event.get("untaken", [])
        if sorted(untaken) != sorted(self.running or []):
            self.violation(f"untaken {untaken}, but {self.running} were taken")
        for number in untaken:
            self.count_transition(self.move(number, Event.UNTAKE), "take", -1)
        self.running = None

    def on_resume(self, event: Mapping[str, Any]) -> None:
        self.check_epoch(event)
        version = event["version"]
        if event["continued"]:
            if version != self.version:
                self.violation(f"continues at version {version}, but {self.version} is committed")
            return
        if not self.checkpoint <= version <= self.version:
            self.violation(f"rewound to version {version}, which is not in {self.checkpoint}..{self.version}")
        for number in event.get("waiting", []):
            self.trained -= self.groups[number].state is _S.TRAINED
            self.move(number, Event.REWIND)
        self.version = version

    def on_rebuild(self, event: Mapping[str, Any]) -> None:
        check_rebuild(self, event)

    def on_take(self, event: Mapping[str, Any]) -> None:
        self.check_epoch(event)
        if self.running is not None or event["step"] != self.version:
            self.violation(
                f"step {event['step']} is taken at version {self.version} while {self.running} run"
            )
        self.running = list(event["groups"])
        for number in self.running:
            self.count_transition(self.move(number, Event.TAKE), "take", 1)

    def on_commit(self, event: Mapping[str, Any]) -> None:
        self.check_epoch(event)
        step = event["step"]
        if event["version"] != self.version + 1 or step != self.version:
            self.violation(
                f"version {event['version']} from step {step} does not follow version {self.version}"
            )
        if sorted(int(number) for number in event["groups"]) != sorted(self.running or []):
            self.violation(f"groups {sorted(event['groups'])} are committed, {self.running} were taken")
        for name, counts in event["groups"].items():
            self.train(int(name), step, {int(version): n for version, n in counts.items()})
        self.version, self.running = step + 1, None
        present = (*self.counters()[1:], len(self.groups) - self.trained - self.dropped)
        stated = (event["issued"], event["trained"], event["dropped"], event["active"])
        if stated != present or stated[0] != sum(stated[1:]):
            self.violation(
                f"issued, trained, dropped, active are {stated} in the event and {present} in the log"
            )

    def train(self, number: int, step: int, counts: Mapping[int, int]) -> None:
        """One group of a commit."""
        group = self.move(number, Event.COMMIT)
        self.count_transition(group, "commit", 1)
        self.trained += 1
        group.step = step
        if group.passed != {"accept": 1, "take": 1, "commit": 1}:
            self.violation(f"group {number}: {group.passed} on the path to this commit, not one of each")
        group.trained_lag = max((lag(step, version) for version, n in counts.items() if n), default=0)
        if group.trained_lag > group.bound:
            self.violation(
                f"group {number}: a token of lag {group.trained_lag} was trained, over the bound {group.bound}"
            )
        over = [version for version, n in counts.items() if n > group.counts.get(version, 0)]
        if over:
            self.violation(f"group {number}: more tokens of versions {over} trained than accepted")

    def on_checkpoint(self, event: Mapping[str, Any]) -> None:
        self.checkpoint = event["version"]

    def counters(self) -> tuple[int, int, int, int]:
        """Version, groups issued, trained, dropped."""
        return self.version, len(self.groups), self.trained, self.dropped

    def count_transition(self, group: ReplayedGroup, what: str, by: int) -> None:
        group.passed[what] = group.passed.get(what, 0) + by

    def check_epoch(self, event: Mapping[str, Any]) -> None:
        if event["epoch"] != self.epoch:
            self.violation(f"epoch {event['epoch']} acts, but {self.epoch} holds the run")

    def result(self, missing: str | None = None) -> AuditResult:
        """The counters at the end of the log, of which `missing` is not there."""
        trained = [group for group in self.groups.values() if group.state is _S.TRAINED]
        active = sum(group.state in ACTIVE for group in self.groups.values())
        self.now = "end"
        if missing:
            self.violation(missing)
        if len(self.groups) != len(trained) + self.dropped + active:
            self.violation(
                f"{len(self.groups)} groups issued, but {len(trained)} trained, {self.dropped} dropped and {active} active"
            )
        steps = len({group.step for group in trained})
        return AuditResult(
            issued=len(self.groups), trained=len(trained), dropped=self.dropped, active=active,
            max_lag=max((group.trained_lag for group in trained), default=0), bound=max((group.bound for group in trained), default=0),
            steps=steps, violations=list(self.violations),
        )  # fmt: skip
