"""Builds the snapshot for a ledger that lost acknowledged writes, from archive and journal.

The archive is complete up to its last line. The journal (`trainer/storage/spool.py`) has later accepts and
commits, which are applied after the archive. Everything else is undone: leases and running steps are
returned, dropped groups are tried again. A trained group is never trained again.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy, admits
from services.ledger.event_log.events import (
    AcceptEvent,
    BoundEvent,
    BoundPendingEvent,
    CheckpointEvent,
    ClaimEvent,
    CommitEvent,
    CreateEvent,
    DrainEvent,
    DropEvent,
    HaltEvent,
    LeaseEvent,
    LedgerEvent,
    LostEvent,
    RebuildEvent,
    ReleaseEvent,
    ResumeEvent,
    StepsEvent,
    TakeEvent,
    UnhaltEvent,
    event_bound,
)
from services.ledger.interface import (
    JournalAccept,
    JournalCommit,
    JournalEvent,
    Snapshot,
    StepRecord,
    TakenGroup,
)

_S = GroupState


@dataclass(slots=True)
class _Group:
    state: GroupState = _S.WAITING
    token: str = ""
    deadline: int = 0
    max_staleness: int = 0
    version: int = 0
    attempt: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    step: int = -1

    def to_taken_group(self, number: int) -> TakenGroup:
        return TakenGroup(number, self.token, self.deadline, self.max_staleness, self.version, self.counts)

    def set_lease(self, lease: LeaseEvent | JournalAccept) -> None:
        self.token, self.version = lease.token, lease.version
        self.deadline, self.max_staleness = lease.deadline, lease.bound

    def reset(self) -> None:
        self.state, self.token, self.counts, self.step = _S.WAITING, "", {}, -1

    def newest_version(self) -> int:
        return max((version for version, n in self.counts.items() if n), default=-1)


class SnapshotBuilder:
    """Replays a run: call `apply` for every archived event, then `apply_journal`, then `snapshot`.

    Events must be applied oldest first.
    """

    def __init__(self) -> None:
        self.fingerprint = ""
        """Fingerprint of the prompt stream; empty until a `create` event is applied."""
        self.prompts: int | None = None
        """Number of prompts in the stream; None for an infinite stream."""
        self.steps = 0
        """Number of steps after which the run is done."""
        self.bound = Bound()
        """Bound in force."""
        self.pending: Bound | None = None
        """Change of the bound that waited for rule F; it must be requested again."""
        self.sequence = 0
        """Number of the last archived event."""
        self.version = 0
        """Committed version."""
        self.digest: int | None = None
        """Digest of the committed version's weights; None if no trainer has declared it."""
        self._checkpoint = 0
        self._epochs: list[str] = []
        self._groups: dict[int, _Group] = {}
        self._records: dict[int, StepRecord] = {}
        self._trained = 0
        self._reasons: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()
        """Drop reason -> number of wasted tokens."""
        self._halted = ""
        self._draining = False
        self._accepted: set[tuple[int, str]] = set()
        self._committed: set[tuple[str, int]] = set()
        self._journal_events: list[JournalEvent] = []

    def apply(self, event: LedgerEvent) -> None:
        """Apply one archived event."""
        self.sequence = event.seq
        match event:
            case CreateEvent():
                self.fingerprint, self.steps = event.fingerprint, event.steps
                self.prompts = None if event.prompts < 0 else event.prompts
                self.bound, self.pending = event_bound(event), None
            case StepsEvent():
                self.steps = event.steps
            case BoundEvent():
                self.bound, self.pending = event_bound(event), None
            case BoundPendingEvent():
                self.pending = event_bound(event)
            case DrainEvent():
                self._draining = event.on
            case HaltEvent():
                self._halted = event.reason
            case UnhaltEvent():
                self._unhalt()
            case LeaseEvent():
                group = self._groups.setdefault(event.group, _Group())
                group.set_lease(event)
                group.state, group.attempt = _S.LEASED, event.attempt
            case ReleaseEvent() | LostEvent():
                self._groups[event.group].reset()
            case AcceptEvent():
                self._accept(event)
            case DropEvent():
                self._groups[event.group].state = _S.DROPPED
                self._reasons[event.reason] += 1
                self._wasted[event.reason] += event.wasted_tokens
            case ClaimEvent():
                self._epochs.append(event.epoch)
                self._set_state(event.untaken, _S.SCORED)
            case ResumeEvent():
                self._resume(event)
            case TakeEvent():
                self._set_state(event.groups, _S.TAKEN)
            case CommitEvent():
                self._commit(event)
            case CheckpointEvent():
                self._checkpoint = event.version
                self._records = {step: r for step, r in self._records.items() if step >= event.version}
            case RebuildEvent():
                self._rebuild(event)

    def apply_journal(self, event: JournalEvent) -> None:
        """Apply an accept or commit from the journal, unless the archive contains it."""
        match event:
            case JournalAccept():
                group = self._groups.get(event.group)
                if (event.group, event.token) in self._accepted or (
                    group is not None and group.state in (_S.TRAINED, _S.DROPPED)
                ):
                    return
            case JournalCommit():
                if event.step > self.version or (event.epoch, event.step) in self._committed:
                    return
        self._journal_events.append(event)
        self._replay_journal(event)

    def _replay_journal(self, event: JournalEvent) -> None:
        if isinstance(event, JournalAccept):
            self._accept(event)
        else:
            self._commit(event)

    def snapshot(
        self, *, epoch: str, last_event: int, sequence: int, reports: Mapping[int, bytes]
    ) -> Snapshot:
        """Return the state that the ledger must have.

        Args:
            epoch: new epoch, which fences the trainer that held the run.
            last_event: number of the newest event in the ledger; -1 if the run is missing.
            sequence: highest recorded event number.
            reports: step -> encoded `StepReport`; may contain other steps.
        """
        self._undo()
        self._admit_scored()
        groups = {number: group for number, group in self._groups.items() if group.state is not _S.DROPPED}
        scored = {number: group for number, group in groups.items() if group.state is _S.SCORED}
        waiting = {number: group.attempt for number, group in groups.items() if group.state is _S.WAITING}
        attempts = {
            number: group.attempt
            for number, group in groups.items()
            if group.state is not _S.WAITING and group.attempt > 1
        }
        steps = range(self._checkpoint, self.version)
        return Snapshot(
            epoch=epoch,
            epochs=tuple(dict.fromkeys(self._epochs)),
            found=last_event,
            after=self.sequence,
            sequence=max(sequence, self.sequence, last_event),
            version=self.version,
            digest=self.digest,
            checkpoint=self._checkpoint,
            issued=len(self._groups),
            trained=self._trained,
            dropped=sum(self._reasons.values()),
            wasted_tokens=self._wasted.total(),
            reasons=dict(self._reasons),
            halted=self._halted,
            draining=self._draining,
            scored=tuple(group.to_taken_group(number) for number, group in sorted(scored.items())),
            waiting=dict(sorted(waiting.items())),
            attempts=attempts,
            steps=tuple(record for step, record in sorted(self._records.items()) if step >= self._checkpoint),
            reports={step: report for step, report in sorted(reports.items()) if step in steps},
            journal_events=tuple(self._journal_events),
            wasted_by_reason=dict(self._wasted),
        )

    def _undo(self) -> None:
        """Undo leases and the running step."""
        for group in self._groups.values():
            if group.state is _S.LEASED:
                group.reset()
            elif group.state is _S.TAKEN:
                group.state = _S.SCORED

    def _admit_scored(self) -> None:
        """Keep the scored groups that the committed version and rule F allow; return others to WAITING."""
        admitted: list[int] = []
        scored = [
            (group.deadline, number, group)
            for number, group in self._groups.items()
            if group.state is _S.SCORED
        ]
        for deadline, _, group in sorted(scored, key=lambda item: item[:2]):
            fits = self.bound.policy is Policy.MASK or admits(admitted, deadline, self.version, self.bound)
            if fits and group.newest_version() <= self.version:
                admitted.append(deadline)
            else:
                group.reset()

    def _issue(self, issued: int) -> None:
        """Add the groups below `issued` whose lease events were lost."""
        for number in range(len(self._groups), issued):
            self._groups[number] = _Group()

    def _set_state(self, numbers: Iterable[int], state: GroupState) -> None:
        for number in numbers:
            self._groups[number].state = state

    def _unhalt(self) -> None:
        self._halted = ""
        for group in self._groups.values():
            if group.state in (_S.WAITING, _S.LEASED):
                group.attempt = 0

    def _accept(self, event: AcceptEvent | JournalAccept) -> None:
        self._issue(event.group + 1)  # the lease may be recorded only in the journal
        group = self._groups[event.group]
        if isinstance(event, JournalAccept):
            group.set_lease(event)
            group.attempt = max(group.attempt, 1)
        group.state, group.counts = _S.SCORED, event.counts
        self._accepted.add((event.group, event.token))

    def _resume(self, event: ResumeEvent) -> None:
        self.digest = int(event.digest)
        if event.continued:
            return
        self._rewind(event.version, event.waiting)
        if (record := self._records.get(self.version - 1)) is not None:
            self._records[record.step] = replace(record, digest=self.digest)

    def _rewind(self, version: int, waiting: Iterable[int]) -> None:
        for number in waiting:
            group = self._groups[number]
            self._trained -= group.state is _S.TRAINED
            group.reset()
            group.attempt = 0
        self._records = {step: record for step, record in self._records.items() if step < version}
        self.version = version

    def _abandoned_groups(self, version: int) -> list[int]:
        """Return the groups trained in step `version` or later, or scored with a token of a later version."""
        return [
            number
            for number, group in self._groups.items()
            if (group.state is _S.TRAINED and group.step >= version)
            or (group.state is _S.SCORED and group.newest_version() > version)
        ]

    def _commit(self, event: CommitEvent | JournalCommit) -> None:
        step = event.step
        if step < self.version:  # the rewind event was lost
            self._rewind(step, self._abandoned_groups(step))
        if isinstance(event, JournalCommit):
            for accepted in event.accepted:
                self._accept(accepted)
        for number in event.groups:
            self._groups[number].state, self._groups[number].step = _S.TRAINED, step
        batch = sorted(
            (self._groups[number].to_taken_group(number) for number in event.groups),
            key=lambda group: (group.deadline, group.group),
        )
        self._trained += len(event.groups)
        self.version, self.digest = step + 1, int(event.digest)
        self._committed.add((event.epoch, step))
        self._records[step] = StepRecord(step, event.epoch, self.digest, tuple(batch))

    def _rebuild(self, event: RebuildEvent) -> None:
        for journal_event in event.journal_events:
            self._replay_journal(journal_event)
        self._issue(event.issued)
        self._undo()
        for number in event.waiting:
            self._groups[number].reset()
        self._epochs.append(event.epoch)
        self.pending = None
