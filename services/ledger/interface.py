"""Defines the protocol of every ledger, its arguments and results, and the limits of a run.

The ledger on Redis (`redis/ledger.py`) and the tests' oracle in memory pass one contract suite.

A method either takes effect completely or raises `Refused` without an effect. Repeating it after a lost reply
is harmless: the second call returns the first one's result.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run as its settings describe it."""

    run: str
    """Name of the run."""
    fingerprint: str
    """Fingerprint of the prompt stream; group g is prompt g of it."""
    prompts: int | None
    """Prompts in the stream, all passes counted; None if it has no end."""
    steps: int
    """Steps after which the run is done."""
    bound: Bound
    """Bound in force when the run is created."""
    max_attempts: int = 5
    """Leases of one group before it is dropped, with the reason `attempts`."""
    drop_share: float = 0.9
    """Share of the last `drop_window` finished groups that one drop reason may have before the run halts."""
    drop_window: int = 64


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease of one group, to be generated."""

    group: int
    token: str
    """Identifies the lease in later calls."""
    epoch: str
    """Epoch that the holder's engine had acknowledged."""
    version: int
    """The version that the holder's engine had acknowledged when the lease was granted."""
    deadline: int
    """Last step that may train it untouched: `version` + `max_staleness`."""
    max_staleness: int
    """E in force when the lease was granted, in versions; later changes do not affect it."""
    attempt: int
    """1 for the first lease of the group."""


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group in the batch of the running step."""

    group: int
    token: str
    """The lease token whose record the spool holds."""
    deadline: int
    max_staleness: int
    version: int
    """This field, `deadline` and `max_staleness` describe the lease."""
    counts: Mapping[int, int]
    """Sampled tokens by version, as accepted."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The batch of one step."""

    step: int
    """The version that the step starts from."""
    groups: tuple[TakenGroup, ...]
    """In order of (deadline, group)."""
    dropped: tuple[int, ...] = ()
    """Groups dropped by the takes before it (`straggler`, `stale`), to be aborted."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step that no durable checkpoint covers yet, with its batch."""

    step: int
    epoch: str
    digest: int
    """Digest of the manifest of version step + 1."""
    groups: tuple[TakenGroup, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """A live process of the run."""

    role: str
    incarnation: str
    info: Mapping[str, Any]
    """JSON values: pid, host, endpoints by topic, engine version, health port ..."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """Counters of a run, read in one script, so that they agree with each other."""

    version: int
    epoch: str
    sequence: int
    """Number of the last event."""
    bound: Bound
    pending: Bound | None
    """A bound that waits until rule F allows it."""
    steps: int
    issued: int
    trained: int
    dropped: int
    states: Mapping[GroupState, int]
    """Number of groups that are WAITING, LEASED, SCORED and TAKEN."""
    dropped_by_reason: Mapping[str, int]
    wasted_tokens: int
    """Sampled tokens of dropped groups, as far as they were reported."""
    halted: str = ""
    """Drop reason or trainer's cause that stopped leasing until `drain(False)`, or empty."""
    draining: bool = False
    engines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Engine incarnation -> (epoch, version) that it acknowledged last."""
    wasted_by_reason: Mapping[str, int] = field(default_factory=dict)
    """Drop reason -> its part of `wasted_tokens`."""
    fingerprint: str = ""
    """Fingerprint of the prompt stream with which the run was created."""

    @property
    def active(self) -> int:
        """Return the number of groups that are neither TRAINED nor DROPPED."""
        return sum(self.states.values())

    @property
    def done(self) -> bool:
        """Return whether the last step is committed."""
        return self.version >= self.steps


@dataclass(frozen=True, slots=True)
class Head:
    """Position of a run, without what grows with the number of engines."""

    epoch: str
    """Epoch of the last claim; empty before the first."""
    version: int
    sequence: int
    """Number of the last event."""
    published: int
    """The version of `Ledger.manifest`; -1: there is none."""


class JournalAccept(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="accept"):
    """An accepted group, as the journal in the spool has it: its lease, and its tokens."""

    group: int
    token: str
    version: int
    deadline: int
    bound: int
    """`max_staleness` of the lease."""
    counts: dict[int, int]
    """Sampled tokens by version."""


class JournalCommit(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="commit"):
    """A committed step, as the journal in the spool has it."""

    epoch: str
    step: int
    """The version that it started from."""
    digest: str
    """Digest of the weights of version `step` + 1, in decimal."""
    groups: dict[int, dict[int, int]]
    """Group -> tokens that carried gradient by version."""
    accepted: list[JournalAccept]
    """The batch, in the order in which it was taken."""


JournalEvent = JournalAccept | JournalCommit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Full state of a run, which `services/ledger_recovery` builds and `Ledger.rebuild` writes."""

    epoch: str
    """A new, unused one: it fences the trainer that held the run."""
    epochs: tuple[str, ...]
    """Every epoch that ever claimed the run."""
    found: int
    """Number of the last event in the ledger when it was read; -1 if the run was not there."""
    after: int
    """Number of the last event in the archive; those from there up to `sequence` are lost."""
    sequence: int
    """Highest number of an event that anybody recorded; new events get higher ones."""
    version: int
    digest: int | None
    checkpoint: int
    issued: int
    trained: int
    dropped: int
    wasted_tokens: int
    reasons: Mapping[str, int]
    halted: str
    draining: bool
    scored: tuple[TakenGroup, ...]
    waiting: Mapping[int, int]
    """Every other active group -> leases it had."""
    attempts: Mapping[int, int]
    """Scored or trained group -> leases it had, where they are more than 1."""
    steps: tuple[StepRecord, ...]
    """Committed steps that no checkpoint covers."""
    reports: Mapping[int, bytes]
    """Step -> encoded `StepReport`."""
    journal_events: tuple[JournalEvent, ...] = ()
    """Accepts and commits that only the journal knew, oldest first."""
    wasted_by_reason: Mapping[str, int] = field(default_factory=dict)


class Ledger(Protocol):
    """State of one run. Leases and registrations end by its clock (ms), which no wall clock makes jump."""

    async def create(self, spec: RunSpec) -> None:
        """Create the run, or update its steps and drop limits. Refuses RUN_MISMATCH, WRONG_STATE."""

    async def rebuild(self, spec: RunSpec, snapshot: Snapshot) -> None:
        """Replace the run by `snapshot`: no lease, no running step, no engine that may lease.

        `spec.bound` is the bound in force. Repeating it with the same epoch has no effect. Refuses
        WRONG_STATE if an event was written since `snapshot.found`.
        """

    async def status(self) -> LedgerStatus:
        """Return all counters. Refuses NO_RUN."""

    async def head(self) -> Head:
        """Return where the run stands; cheap enough to be called often. Refuses NO_RUN."""

    # -- engines and processes
    async def register(self, peer: Peer, ttl_ms: int) -> None:
        """Record that a process lives, for `ttl_ms`."""

    async def unregister(self, incarnation: str, *, refuted: bool = False) -> None:
        """Forget a process; its leases expire. A `refuted` one gets no others, and its are released."""

    async def peers(self, role: str | None = None) -> Sequence[Peer]:
        """Return the processes whose time-to-live is not over, of one role or of all."""

    async def endpoints(self, topic: str) -> Mapping[str, str]:
        """Return the endpoints of `topic` by incarnation; cheap; may include processes that just died."""

    async def applied(self, engine: str, epoch: str, version: int) -> None:
        """Record that an engine serves (epoch, version).

        A smaller version than is recorded for the same incarnation and epoch is ignored. Refuses REFUTED;
        STALE_EPOCH if `epoch` is not on the current branch, WRONG_STATE if `version` is not committed.
        """

    async def lease(
        self, *, request: str, engine: str, holder: str, lease_ms: int, groups: int = -1
    ) -> Lease:
        """Lease the next group: a WAITING or expired one first, else a new one.

        Repeating it with the same `request` returns the same lease. Refuses BOUND, PENDING, DONE, EXHAUSTED,
        DRAINING, HALTED, REFUTED, STALE_ENGINE, ARCHIVE_BEHIND; by `groups` BUSIER (-1: no), see lease.lua.
        """

    async def extend(self, group: int, token: str, lease_ms: int) -> None:
        """Make a lease end `lease_ms` from now. Refuses NOT_HELD; BOUND if it expired and has no room."""

    async def release(self, group: int, token: str, reason: str) -> None:
        """Return a group, to be leased again; attempts stay counted. Refuses NOT_HELD, WRONG_STATE."""

    async def accept(
        self, group: int, token: str, counts: Mapping[int, int], reward: float | None = None
    ) -> TakenGroup:
        """Record that the spool holds the group's record; return the group as batches list it.

        `counts` has its sampled tokens by version, `reward` the mean over its samples, for the event log.
        Refuses NOT_HELD, UNKNOWN_GROUP, WRONG_STATE; DUPLICATE for a group that is finished and forgotten;
        BOUND if the lease had expired and rule F leaves no room for the group.
        """

    async def lost(self, group: int, token: str) -> None:
        """Have a SCORED group leased again, because the spool does not hold its record."""

    async def drop(self, group: int, token: str, reason: str, wasted: int = 0, detail: str = "") -> None:
        """Drop a group for `reason`, a word, to which `detail` led. Refuses NOT_HELD, WRONG_STATE (TAKEN)."""

    async def filter(self, group: int, token: str, tokens: int, reward: float, most_batches: int) -> None:
        """Drop a LEASED group that the ingest's filter leaves out: its place in rule F is free again.

        Its reason is `no_signal`, which `drop_share` does not count; the run halts for it once so many groups
        as `most_batches` steps take were filtered since the last commit, 0: never. A group that was accepted
        stays as it is. Refuses NOT_HELD, UNKNOWN_GROUP; DUPLICATE for a group that is finished and forgotten.

        Args:
            group: the group.
            token: its current one.
            tokens: sampled tokens of the group, all of which are wasted.
            reward: the mean over its samples, for the event log.
            most_batches: the limit, see above.
        """

    # -- the trainer
    async def claim(self, epoch: str) -> LedgerStatus:
        """Fence older epochs, and return TAKEN groups to SCORED. Refuses STALE_EPOCH for a fenced epoch."""

    async def resume(self, epoch: str, version: int, digest: int) -> bool:
        """State that the trainer of `epoch` stands at `version` with weights of `digest`.

        To be called once after `claim`, before `take`. Returns True if the branch continues: same version and
        digest, or no version was committed yet. Returns False if the ledger was rewound to `version`:
        each group generated or trained on the abandoned branch is WAITING with no attempts counted, and
        engines get leases only once they serve the new epoch. Refuses STALE_EPOCH; WRONG_STATE if `version`
        is ahead of the ledger, older than the last `checkpointed` one, or not the one at which this epoch
        resumed before.
        """

    async def take(self, epoch: str) -> Taken:
        """Take the batch of the next step; return the same one while that step runs.

        The batch is short only if no more groups can come: the prompts have run out and no group is LEASED or
        WAITING, or a pending bound or a drain stops leasing and no live lease is left. Groups dropped on the
        way stay dropped after a refusal; the next batch reports them.

        Refuses NOT_ENOUGH, STRAGGLER (`detail` is the group), STALE_EPOCH, WRONG_STATE before `resume`, DONE
        after the last step, EXHAUSTED if no group is left to take.
        """

    async def commit(
        self,
        epoch: str,
        step: int,
        trained: Mapping[int, Mapping[int, int]],
        *,
        digest: int,
        report: bytes,
        manifest: bytes,
    ) -> int:
        """Record that all groups of the running step are trained; an empty `manifest` publishes nothing.

        `trained` has the tokens that carried gradient, by group and version. Returns the new version, also if
        repeated. Refuses STALE_EPOCH, STALE_STEP, WRONG_STATE for other groups or more tokens than were
        accepted, BOUND for tokens over the bound.
        """

    async def publish(self, epoch: str, manifest: bytes, version: int) -> None:
        """Set the manifest without a commit, of any committed version. Refuses STALE_EPOCH, WRONG_STATE."""

    async def manifest(self) -> bytes | None:
        """Return the newest published manifest, an encoded `WeightManifest`."""

    async def step_records(self, first: int) -> Sequence[StepRecord]:
        """Return committed steps >= `first` that no checkpoint covers, in order."""

    async def reports(self, first: int) -> Sequence[bytes]:
        """Return their encoded `StepReport`s, in order."""

    async def checkpointed(self, version: int) -> None:
        """Forget what a durable checkpoint covers: records and reports of all steps below `version`.

        Engines that are not registered any more and serve an older version are forgotten, too.
        """

    async def ended(self, groups: Collection[int]) -> set[int]:
        """Return the `groups` that never come back: DROPPED, or finished and forgotten."""

    async def halt(self, epoch: str, cause: str) -> None:
        """Stop granting leases until `drain(False)`; the first cause is kept. Refuses STALE_EPOCH."""

    async def set_bound(
        self,
        *,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
        policy: Policy | None = None,
    ) -> Bound | None:
        """Ask for another bound. Returns None if it is in force, else the bound that is pending."""

    async def drain(self, on: bool = True) -> None:
        """Stop granting leases, or grant them again; that ends a halt and counts drops and attempts anew."""

    async def events(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return at most `limit` events numbered above `after`, oldest first, as JSON values of the log."""

    async def archived(self, sequence: int) -> None:
        """Forget events up to `sequence`, which the archive holds."""

    async def close(self) -> None:
        """Close connections."""
