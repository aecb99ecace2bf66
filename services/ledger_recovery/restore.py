"""What a ledger has to hold, told from the archive of its event log and from the journal, after it lost
acknowledged writes.

The archive is complete up to its last line. Of what came after it, the journal (see
`trainer/storage/spool.py`) knows the accepts and commits: as events of their own, `tail`, they follow the
archive. What neither knows is undone: leases and running steps go back, dropped groups are tried again. A
group that was trained is never trained again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy, admits
from services.ledger.interface import Snapshot, StepRecord, TakenGroup
from services.ledger.redis.json_codec import decode_bound, decode_counts

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

    def taken(self, number: int) -> TakenGroup:
        return TakenGroup(number, self.token, self.deadline, self.max_staleness, self.version, self.counts)


class SnapshotBuilder:
    """Give it every event by `apply`, oldest first, then those of the journal by `apply_journal`; then ask
    for the `snapshot`."""

    def __init__(self) -> None:
        self.fingerprint = ""
        """Empty while no `create` was seen."""
        self.prompts: int | None = None
        self.steps = 0
        self.bound = Bound()
        self.pending: Bound | None = None
        """A change that waited for rule F; it has to be asked for again."""
        self.sequence = 0
        self.version = 0
        self.digest: int | None = None
        self._checkpoint = 0
        self._epochs: list[str] = []
        self._groups: dict[int, _Group] = {}
        self._records: dict[int, StepRecord] = {}
        self._trained = 0
        self._reasons: Counter[str] = Counter()
        self._wasted = 0
        self._halted = ""
        self._draining = False
        self._accepted: set[tuple[int, str]] = set()
        self._committed: set[tuple[str, int]] = set()
        self._told: list[Mapping[str, Any]] = []

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event of the archive in."""
        self.sequence = event["seq"]
        handler: Callable[[Mapping[str, Any]], None] | None = getattr(self, f"on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def apply_journal(self, event: Mapping[str, Any]) -> None:
        """Take an accept or a commit of the journal in, unless the archive has it."""
        if event["event"] == "accept":
            if (event["group"], event["token"]) in self._accepted:
                return
            group = self._groups.get(event["group"])
            if group is not None and group.state in (_S.TRAINED, _S.DROPPED):
                return
        elif event["step"] > self.version or (event["epoch"], event["step"]) in self._committed:
            return
        self._told.append(event)
        self.apply({"seq": self.sequence, **event})

    def snapshot(self, *, epoch: str, found: int, sequence: int, reports: Mapping[int, bytes]) -> Snapshot:
        """All that the ledger is to hold.

        Args:
            epoch: a new one, nobody's: it fences whoever held the run.
            found: number of the last event of the ledger as it was found, -1 if the run was not there.
            sequence: the highest number that anybody has noted.
            reports: encoded `StepReport` by step, of any steps.
        """
        self._undo()
        self._admit_scored()
        groups = {number: group for number, group in self._groups.items() if group.state is not _S.DROPPED}
        scored = {number: group for number, group in groups.items() if group.state is _S.SCORED}
        waiting = {number: group.attempt for number, group in groups.items() if group.state is _S.WAITING}
        return Snapshot(
            epoch=epoch,
            epochs=tuple(dict.fromkeys(self._epochs)),
            found=found,
            after=self.sequence,
            sequence=max(sequence, self.sequence, found),
            version=self.version,
            digest=self.digest,
            checkpoint=self._checkpoint,
            issued=len(self._groups),
            trained=self._trained,
            dropped=sum(self._reasons.values()),
            wasted_tokens=self._wasted,
            reasons=dict(self._reasons),
            halted=self._halted,
            draining=self._draining,
            scored=tuple(group.taken(number) for number, group in sorted(scored.items())),
            waiting=dict(sorted(waiting.items())),
            attempts={
                number: group.attempt
                for number, group in groups.items()
                if group.state is not _S.WAITING and group.attempt > 1
            },
            steps=tuple(record for step, record in sorted(self._records.items()) if step >= self._checkpoint),
            reports={
                step: report
                for step, report in sorted(reports.items())
                if self._checkpoint <= step < self.version
            },
            told=tuple(self._told),
        )

    def _undo(self) -> None:
        for group in self._groups.values():
            if group.state is _S.LEASED:
                _wait(group)
            elif group.state is _S.TAKEN:
                group.state = _S.SCORED

    def _admit_scored(self) -> None:
        """Keep of the scored groups what the committed version and rule F allow; others are made again."""
        places: list[int] = []
        scored = [
            (group.deadline, number, group)
            for number, group in self._groups.items()
            if group.state is _S.SCORED
        ]
        for deadline, _, group in sorted(scored, key=lambda item: item[:2]):
            fits = self.bound.policy is Policy.MASK or admits(places, deadline, self.version, self.bound)
            if fits and _newest(group) <= self.version:
                places.append(deadline)
            else:
                _wait(group)

    def _issue(self, issued: int) -> None:
        for number in range(len(self._groups), issued):
            self._groups[number] = _Group()

    # -- events
    # ------------------------------------------------------------------------------------------------------
    def on_create(self, event: Mapping[str, Any]) -> None:
        self.fingerprint = event["fingerprint"]
        self.prompts = None if event["prompts"] < 0 else event["prompts"]
        self.on_steps(event)
        self.on_bound(event)

    def on_steps(self, event: Mapping[str, Any]) -> None:
        self.steps = event["steps"]

    def on_bound(self, event: Mapping[str, Any]) -> None:
        self.bound, self.pending = decode_bound(event), None

    def on_bound_pending(self, event: Mapping[str, Any]) -> None:
        self.pending = decode_bound(event)

    def on_drain(self, event: Mapping[str, Any]) -> None:
        self._draining = event["on"]

    def on_halt(self, event: Mapping[str, Any]) -> None:
        self._halted = event["reason"]

    def on_unhalt(self, event: Mapping[str, Any]) -> None:
        self._halted = ""
        for group in self._groups.values():
            if group.state in (_S.WAITING, _S.LEASED):
                group.attempt = 0

    def on_lease(self, event: Mapping[str, Any]) -> None:
        group = self._groups.setdefault(event["group"], _Group())
        self._hold(group, event)
        group.state, group.attempt = _S.LEASED, event["attempt"]

    def _hold(self, group: _Group, event: Mapping[str, Any]) -> None:
        group.token, group.version = event["token"], event["version"]
        group.deadline, group.max_staleness = event["deadline"], event["bound"]

    def on_release(self, event: Mapping[str, Any]) -> None:
        _wait(self._groups[event["group"]])

    on_lost = on_release

    def on_accept(self, event: Mapping[str, Any]) -> None:
        self._issue(event["group"] + 1)  # its lease may be known to the journal only
        group = self._groups[event["group"]]
        if "deadline" in event:
            self._hold(group, event)
            group.attempt = max(group.attempt, 1)
        group.state, group.counts = _S.SCORED, decode_counts(event["counts"])
        self._accepted.add((event["group"], event["token"]))

    def on_drop(self, event: Mapping[str, Any]) -> None:
        self._groups[event["group"]].state = _S.DROPPED
        self._reasons[event["reason"]] += 1
        self._wasted += event["wasted_tokens"]

    def on_claim(self, event: Mapping[str, Any]) -> None:
        self._epochs.append(event["epoch"])
        for number in event.get("untaken", ()):
            self._groups[number].state = _S.SCORED

    def on_resume(self, event: Mapping[str, Any]) -> None:
        self.digest = int(event["digest"])
        if not event["continued"]:
            self._rewind(event["version"], event.get("waiting", ()))
            if (record := self._records.get(self.version - 1)) is not None:
                self._records[record.step] = replace(record, digest=self.digest)

    def _rewind(self, version: int, waiting: Iterable[int]) -> None:
        for number in waiting:
            group = self._groups[number]
            self._trained -= group.state is _S.TRAINED
            _wait(group)
            group.attempt = 0
        self._records = {step: record for step, record in self._records.items() if step < version}
        self.version = version

    def _abandoned(self, version: int) -> list[int]:
        """Groups trained after `version`, or scored with a token of a later one."""
        return [
            number
            for number, group in self._groups.items()
            if (group.state is _S.TRAINED and group.step >= version)
            or (group.state is _S.SCORED and _newest(group) > version)
        ]

    def on_take(self, event: Mapping[str, Any]) -> None:
        for number in event["groups"]:
            self._groups[number].state = _S.TAKEN

    def on_commit(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        if step < self.version:  # the rewind to it was lost
            self._rewind(step, self._abandoned(step))
        for accepted in event.get("accepted", ()):
            self.on_accept(accepted)
        groups = [int(number) for number in event["groups"]]
        for number in groups:
            self._groups[number].state, self._groups[number].step = _S.TRAINED, step
        batch = sorted(
            (self._groups[number].taken(number) for number in groups),
            key=lambda group: (group.deadline, group.group),
        )
        self._trained += len(groups)
        self.version, self.digest = step + 1, int(event["digest"])
        self._committed.add((event["epoch"], step))
        self._records[step] = StepRecord(step, event["epoch"], self.digest, tuple(batch))

    def on_checkpoint(self, event: Mapping[str, Any]) -> None:
        self._checkpoint = event["version"]
        self._records = {step: record for step, record in self._records.items() if step >= self._checkpoint}

    def on_rebuild(self, event: Mapping[str, Any]) -> None:
        for told in event.get("told", ()):
            self.apply({"seq": self.sequence, **told})
        self._issue(event["issued"])
        self._undo()
        for number in event.get("waiting", ()):
            _wait(self._groups[number])
        self._epochs.append(event["epoch"])
        self.pending = None


def _newest(group: _Group) -> int:
    return max((version for version, n in group.counts.items() if n), default=-1)


def _wait(group: _Group) -> None:
    group.state, group.token, group.counts, group.step = _S.WAITING, "", {}, -1
