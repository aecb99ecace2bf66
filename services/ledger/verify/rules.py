"""Checks the rules beyond the lifecycle: leases, accepted tokens, batches, rewinds and rule F.

Rule F is checked whenever a group gets a place, and whenever the bound or the next step changes.
"""

from protocol.lifecycle import NO_SIGNAL, GroupState
from protocol.staleness import Bound, Policy, holds, lag, trainable_counts
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
    ExtendEvent,
    GroupEvent,
    HaltEvent,
    LeaseEvent,
    LedgerEvent,
    PublishEvent,
    RebuildEvent,
    ResumeEvent,
    StepsEvent,
    TakeEvent,
    UnhaltEvent,
    event_bound,
)
from services.ledger.interface import JournalCommit
from services.ledger.verify.replay_state import ReplayState, sampled_versions

_S = GroupState


class Rules:
    """Checks each event twice: `before` and `after` the event is replayed on the state.

    Also stores the part of the run's state that only these checks need.
    """

    def __init__(self, state: ReplayState) -> None:
        self._state = state
        self._steps: int | None = None
        """Number of steps of the run; None if a rebuild may have lost a change."""
        self._prompts = -1
        self._epochs: set[str] = set()
        """Every epoch that claimed the run."""
        self._lineage: set[str] = set()
        """Epochs of the current branch."""
        self._resumed = ""
        """Epoch of the last resume."""
        self._digests: dict[int, str] = {}
        """Version -> digest of its weights, for versions that no checkpoint covers."""
        self._stop_reasons: set[str] = set()
        """Why leasing is stopped: `pending`, `draining`, `halted`."""
        self._waiting: set[int] = set()
        self._expired: set[int] = set()
        self._attempts: dict[int, int] = {}
        """Unfinished group -> number of its leases; a rebuild removes every group until its next lease."""
        self._served: dict[int, int] = {}
        """Group -> version that its holder's engine had acknowledged."""
        self._was_expired = False
        """Whether the current event concerns a group whose lease had expired."""

    def before(self, event: LedgerEvent) -> None:
        """Check an event before it is replayed."""
        self._was_expired = isinstance(event, GroupEvent) and event.group in self._expired
        match event:
            case CreateEvent():
                self._steps, self._prompts = event.steps, event.prompts
                self._check_bound(event_bound(event))
            case StepsEvent():
                self._before_steps(event)
            case BoundPendingEvent():
                self._check_bound(event_bound(event))
                self._stop_reasons.add("pending")
            case BoundEvent():
                self._before_bound(event_bound(event))
            case DrainEvent():
                (self._stop_reasons.add if event.on else self._stop_reasons.discard)("draining")
            case HaltEvent():
                self._stop_reasons.add("halted")
            case UnhaltEvent():
                self._before_unhalt()
            case AppliedEvent():
                self._check_lineage(event.engine, event.epoch)
            case LeaseEvent():
                self._before_lease(event)
            case ExtendEvent():
                if not self._was_expired:
                    self._state.report(f"group {event.group}: extended, but its lease had not run out")
            case DropEvent():
                self._before_drop(event)
            case ClaimEvent():
                if event.epoch in self._epochs:
                    self._state.report(f"epoch {event.epoch} was used before")
                self._epochs.add(event.epoch)
            case ResumeEvent():
                self._before_resume(event)
            case TakeEvent():
                self._before_take(event)
            case PublishEvent():
                self._before_publish(event)
            case CheckpointEvent():
                self._before_checkpoint(event)

    def after(self, event: LedgerEvent) -> None:
        """Check an event after it is replayed."""
        self._index_groups(event)
        match event:
            case LeaseEvent():
                self._after_lease(event)
            case ExtendEvent():
                self._state.check_rule_f(f"group {event.group}")
            case AcceptEvent():
                self._after_accept(event)
            case ResumeEvent():
                self._attempts.update(dict.fromkeys(event.waiting, 0))
            case TakeEvent():
                if self._state.bound.policy is not Policy.MASK:
                    self._state.check_rule_f(f"after the take of step {event.step}")
            case CommitEvent():
                self._after_commit(event)
            case RebuildEvent():
                self._after_rebuild(event)

    def _index_groups(self, event: LedgerEvent) -> None:
        """Update the sets of waiting groups and expired leases."""
        match event:
            case GroupEvent():
                changed = [event.group]
            case ResumeEvent():
                changed = event.waiting
            case RebuildEvent():
                changed = list(self._state.groups)
            case _:
                return
        for number in changed:
            group = self._state.groups.get(number)
            state = group.state if group else None
            expired = group is not None and state is _S.LEASED and group.expired
            (self._waiting.add if state is _S.WAITING else self._waiting.discard)(number)
            (self._expired.add if expired else self._expired.discard)(number)
            if state is _S.DROPPED:
                self._forget(number)

    def _forget(self, number: int) -> None:
        self._attempts.pop(number, None)
        self._served.pop(number, None)

    # -- settings

    def _check_bound(self, bound: Bound) -> None:
        if bound.max_staleness < 0 or bound.groups_per_step < 1:
            self._state.report(f"{bound} is not a valid bound")

    def _before_steps(self, event: StepsEvent) -> None:
        self._steps = event.steps
        if event.steps < self._state.version:
            self._state.report(f"steps are {event.steps}, at version {self._state.version}")

    def _before_bound(self, new: Bound) -> None:
        state = self._state
        self._check_bound(new)
        self._stop_reasons.discard("pending")
        if new == state.bound:
            return
        step = state.next_step()
        deadlines = [state.group(number).deadline for number in state.running or ()]
        untaken = [*state.rule_f_deadlines.values(), *deadlines]
        if (
            not holds(state.rule_f_deadlines.values(), step, new)
            or len(deadlines) > new.groups_per_step
            or (deadlines and not holds(untaken, state.version, new))
        ):
            state.report(f"{new} is in force at step {step}, but rule F does not hold with it")

    def _before_unhalt(self) -> None:
        self._stop_reasons.discard("halted")
        for number in self._attempts:
            if self._state.groups[number].state in (_S.WAITING, _S.LEASED):
                self._attempts[number] = 0

    # -- engines and groups

    def _check_lineage(self, engine: str, epoch: str, subject: str = "") -> None:
        if epoch not in self._lineage:
            self._state.report(f"{subject}engine {engine} serves epoch {epoch}, which is not of the branch")

    def _before_lease(self, event: LeaseEvent) -> None:
        state, number = self._state, event.group
        for reason in sorted(self._stop_reasons):
            state.report(f"group {number}: leased while leases are stopped ({reason})")
        first = min(self._waiting, default=None) if self._waiting else min(self._expired, default=None)
        if first is not None and number != first:
            state.report(f"group {number}: leased before group {first}, which waits")
        if number >= self._prompts >= 0:
            state.report(f"group {number}: leased, but there are {self._prompts} prompts")
        self._check_lineage(event.engine, event.epoch, f"group {number}: ")
        known = state.groups.get(number)
        if known is not None and known.token == event.token:
            state.report(f"group {number}: token {event.token} comes twice")
        if known is None or number in self._attempts:
            expected_attempt = self._attempts.get(number, 0) + 1
            if event.attempt != expected_attempt:
                state.report(f"group {number}: attempt {event.attempt}, but it is number {expected_attempt}")
        self._attempts[number], self._served[number] = event.attempt, event.version

    def _after_lease(self, event: LeaseEvent) -> None:
        state, number = self._state, event.group
        state.check_rule_f(f"group {number}")
        if self._steps is None:
            return
        if len(state.rule_f_deadlines) > (self._steps - state.next_step()) * state.bound.groups_per_step:
            state.report(f"group {number}: leased beyond the {self._steps} steps of the run")

    def _after_accept(self, event: AcceptEvent) -> None:
        state, number = self._state, event.group
        if any(n < 0 for n in event.counts.values()):
            state.report(f"group {number}: counts {event.counts} are not numbers of tokens")
        sampled = sampled_versions(event.counts)
        newest, oldest = max(sampled, default=state.version), min(sampled, default=state.version)
        if newest > state.version:
            state.report(f"group {number}: tokens of version {newest}, which is not committed")
        served = self._served.get(number, oldest)
        if oldest < served:
            state.report(f"group {number}: tokens of version {oldest}, but its engine served {served}")
        if self._was_expired:
            state.check_rule_f(f"group {number}")

    def _before_drop(self, event: DropEvent) -> None:
        state, number, reason = self._state, event.group, event.reason
        group = state.group(number)
        if event.from_state != group.state:
            state.report(f"group {number}: dropped from {event.from_state}, but it is {group.state}")
        accepted = sum(group.counts.values())
        if event.wasted_tokens < accepted:
            state.report(f"group {number}: {event.wasted_tokens} tokens wasted, but {accepted} were accepted")
        if group.state is _S.WAITING and reason != "attempts":
            state.report(f"group {number}: dropped for {reason} while it waits")
        if reason == "stale" and trainable_counts(state.version, group.counts, group.bound):
            state.report(f"group {number}: dropped as stale, but it has tokens within the bound")
        if reason == NO_SIGNAL and (group.state is not _S.LEASED or event.reward is None):
            state.report(
                f"group {number}: dropped for {reason} when it was {group.state}, or without a reward"
            )
        expected_policy = {"stale": Policy.MASK, "straggler": Policy.DROP}.get(reason, state.bound.policy)
        if state.bound.policy is not expected_policy:
            state.report(f"group {number}: dropped as {reason} under {state.bound.policy}")

    # -- the trainer

    def _before_resume(self, event: ResumeEvent) -> None:
        state, version, digest = self._state, event.version, event.digest
        if self._resumed == event.epoch:
            state.report(f"epoch {event.epoch} resumes twice")
        self._resumed = event.epoch
        recorded = digest
        if version == state.version or version > state.checkpoint:
            recorded = self._digests.get(version, digest)
        same = recorded == digest
        if version == state.version and event.continued != (version == 0 or same):
            state.report(
                f"continued is {event.continued} at version {version} with digest {digest}, "
                f"which was {recorded}"
            )
        if event.continued:
            self._lineage.add(event.epoch)
        else:
            self._lineage = {event.epoch}
            self._check_rewind(event, version if same else version - 1)
        self._digests = {v: recorded for v, recorded in self._digests.items() if v < version} | {
            version: digest
        }

    def _check_rewind(self, event: ResumeEvent, newest: int) -> None:
        """Report a rewind that does not undo exactly the leases and the groups of the abandoned branch.

        These are the groups trained in step `event.version` or later, and the scored groups with a token of a
        version above `newest`.
        """
        undone = [
            number
            for number, group in self._state.groups_in_state(_S.LEASED, _S.TRAINED, _S.SCORED)
            if group.state is _S.LEASED
            or (group.state is _S.TRAINED and group.step >= event.version)
            or (group.state is _S.SCORED and max(sampled_versions(group.counts), default=newest) > newest)
        ]
        if event.waiting != sorted(undone):
            self._state.report(
                f"groups {event.waiting} are undone by the rewind, but {sorted(undone)} should be"
            )

    def _before_take(self, event: TakeEvent) -> None:
        state, batch, B = self._state, event.groups, self._state.bound.groups_per_step
        if self._resumed != event.epoch:
            state.report(f"epoch {event.epoch} takes before it resumed")
        if self._steps is not None and event.step >= self._steps:
            state.report(f"step {event.step} is taken, but the run has {self._steps}")
        scored = sorted(
            (due, number)
            for number, due in state.rule_f_deadlines.items()
            if state.groups[number].state is _S.SCORED
        )
        first = [number for _, number in scored[:B]]
        if batch != first:
            state.report(f"groups {batch} are taken, but the first {B} by deadline are {first}")
        if len(batch) < B and not self._may_be_short():
            state.report(f"only {len(batch)} groups are taken of {B}, and more can come")
        for number in batch:
            group = state.group(number)
            if state.bound.policy is not Policy.MASK:
                if group.deadline < event.step:
                    state.report(
                        f"group {number}: taken in step {event.step}, after its deadline {group.deadline}"
                    )
            elif not trainable_counts(event.step, group.counts, group.bound):
                state.report(f"group {number}: taken in step {event.step} without a token within the bound")

    def _may_be_short(self) -> bool:
        """Return whether no more groups can arrive.

        Either leasing is stopped and no lease is live, or the prompts are exhausted and no group is WAITING
        or LEASED.
        """
        state = self._state
        live = any(state.groups[number].state is _S.LEASED for number in state.rule_f_deadlines)
        ended = 0 <= self._prompts <= len(state.groups) and not (live or self._expired or self._waiting)
        return ended or (bool(self._stop_reasons - {"halted"}) and not live)

    def _after_commit(self, event: CommitEvent) -> None:
        self._digests[event.step + 1] = event.digest
        for number, counts in event.groups.items():
            self._forget(number)
            self._state.groups[number].counts = {}  # saves memory in long logs
            for version, n in counts.items():
                if n < 0 or (n and lag(event.step, version) < 0):
                    self._state.report(
                        f"group {number}: {n} tokens of version {version} trained in step {event.step}"
                    )

    def _before_publish(self, event: PublishEvent) -> None:
        state = self._state
        state.check_epoch(event.epoch)
        if event.version > state.version:
            state.report(f"version {event.version} is published, but {state.version} is committed")

    def _before_checkpoint(self, event: CheckpointEvent) -> None:
        state, version = self._state, event.version
        if not state.checkpoint < version <= state.version:
            state.report(
                f"version {version} is durable, which is not in {state.checkpoint + 1}..{state.version}"
            )
        self._digests = {v: digest for v, digest in self._digests.items() if v >= version}

    def _after_rebuild(self, event: RebuildEvent) -> None:
        """Discard facts that the event does not state, so that they are no longer checked."""
        for committed in event.journal_events:
            if isinstance(committed, JournalCommit):
                kept = {v: digest for v, digest in self._digests.items() if v <= committed.step}
                self._digests = kept | {committed.step + 1: committed.digest}
        self._steps, self._lineage, self._resumed = None, set(), ""
        self._stop_reasons.discard("pending")
        self._attempts, self._served = {}, {}
        self._epochs.add(event.epoch)
