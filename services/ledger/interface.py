"""Defines the protocol of every ledger, with its arguments, its results and the limits of a run.

The ledger on Redis (`redis/ledger.py`) and the tests' in-memory oracle pass the same contract suite.

A method either takes effect completely or raises `Refused` without an effect. A call may be repeated after a
lost reply: the second call returns the result of the first.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run as described by its settings."""

    run: str
    """Name of the run."""
    fingerprint: str
    """Fingerprint of the prompt stream; group g is prompt g of the stream."""
    prompts: int | None
    """Number of prompts in the stream over all passes; None for an infinite stream."""
    steps: int
    """Steps after which the run is done."""
    bound: Bound
    """Bound in force when the run is created."""
    max_attempts: int = 5
    """Maximum number of leases per group; a group that exceeds it is dropped for the reason `attempts`."""
    drop_share: float = 0.9
    """The run halts if one drop reason exceeds this share of the last `drop_window` finished groups."""
    drop_window: int = 64


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease to generate one group."""

    group: int
    token: str
    """Token that identifies the lease in later calls."""
    epoch: str
    """Epoch that the holder's engine had acknowledged when the lease was granted."""
    version: int
    """Version that the holder's engine had acknowledged when the lease was granted."""
    deadline: int
    """Last step that may train the group without masking: `version` + `max_staleness`."""
    max_staleness: int
    """E when the lease was granted, in versions; later changes do not affect the lease."""
    attempt: int
    """Number of the lease among the group's leases, from 1."""


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group in the batch of the running step."""

    group: int
    token: str
    """Lease token of the record in the spool."""
    deadline: int
    max_staleness: int
    version: int
    """Version of the lease; `deadline` and `max_staleness` also belong to the lease."""
    counts: Mapping[int, int]
    """Number of sampled tokens by version, as accepted."""


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """The batch of one step."""

    step: int
    """Version from which the step starts."""
    groups: tuple[TakenGroup, ...]
    """In order of (deadline, group)."""
    dropped: tuple[int, ...] = ()
    """Groups dropped by earlier takes (`straggler`, `stale`), whose generation must be aborted."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step and its batch; no durable checkpoint covers the step yet."""

    step: int
    epoch: str
    digest: int
    """Digest of the manifest of version `step` + 1."""
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
    """Counters of a run, read atomically by one script."""

    version: int
    epoch: str
    sequence: int
    """Number of the newest event."""
    bound: Bound
    pending: Bound | None
    """Requested bound that waits until rule F allows it."""
    steps: int
    issued: int
    trained: int
    dropped: int
    states: Mapping[GroupState, int]
    """Number of groups that are WAITING, LEASED, SCORED and TAKEN."""
    dropped_by_reason: Mapping[str, int]
    wasted_tokens: int
    """Number of reported sampled tokens of dropped groups."""
    halted: str = ""
    """Drop reason or trainer's cause that stopped leasing until `drain(False)`; empty if not halted."""
    draining: bool = False
    engines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Engine incarnation -> last acknowledged (epoch, version)."""
    wasted_by_reason: Mapping[str, int] = field(default_factory=dict)
    """Drop reason -> number of wasted tokens."""
    fingerprint: str = ""
    """Fingerprint of the prompt stream when the run was created."""

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
    """Position of a run; its size does not depend on the number of engines."""

    epoch: str
    """Epoch of the last claim; empty before the first claim."""
    version: int
    sequence: int
    """Number of the newest event."""
    published: int
    """Version of `Ledger.manifest`; -1 if there is no manifest."""


class JournalAccept(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="accept"):
    """An accepted group in the journal of the spool: its lease and its tokens."""

    group: int
    token: str
    version: int
    deadline: int
    bound: int
    """`max_staleness` of the lease."""
    counts: dict[int, int]
    """Number of sampled tokens by version."""


class JournalCommit(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="commit"):
    """A committed step in the journal of the spool."""

    epoch: str
    step: int
    """Version from which the step started."""
    digest: str
    """Digest of the weights of version `step` + 1, a decimal string."""
    groups: dict[int, dict[int, int]]
    """Group -> number of tokens with a gradient, by version."""
    accepted: list[JournalAccept]
    """Groups of the batch, in the order of the take."""


JournalEvent = JournalAccept | JournalCommit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Full state of a run. `services/ledger_recovery` builds it for `Ledger.rebuild`."""

    epoch: str
    """New epoch, which fences the trainer that held the run."""
    epochs: tuple[str, ...]
    """Every epoch that ever claimed the run."""
    found: int
    """Number of the newest event when the ledger was read; -1 if the run was missing."""
    after: int
    """Number of the newest archived event; later events up to `sequence` are lost."""
    sequence: int
    """Highest recorded event number; new events get higher numbers."""
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
    """Every other active group -> number of its leases."""
    attempts: Mapping[int, int]
    """Scored or trained group -> number of its leases, if above 1."""
    steps: tuple[StepRecord, ...]
    """Committed steps that no checkpoint covers."""
    reports: Mapping[int, bytes]
    """Step -> encoded `StepReport`."""
    journal_events: tuple[JournalEvent, ...] = ()
    """Accepts and commits found only in the journal, oldest first."""
    wasted_by_reason: Mapping[str, int] = field(default_factory=dict)


class Ledger(Protocol):
    """State of one run. Leases and registrations expire by a monotonic clock of the ledger (ms)."""

    async def create(self, spec: RunSpec) -> None:
        """Create the run, or update its steps and drop limits. Refuses RUN_MISMATCH, WRONG_STATE."""

    async def rebuild(self, spec: RunSpec, snapshot: Snapshot) -> None:
        """Replace the run by `snapshot`, without leases, a running step or engines that may lease.

        `spec.bound` is the bound in force. Repeated calls with the same epoch have no effect. Refuses
        WRONG_STATE if an event was written after `snapshot.found`.
        """

    async def status(self) -> LedgerStatus:
        """Return all counters. Refuses NO_RUN."""

    async def head(self) -> Head:
        """Return the position of the run; cheap enough for frequent calls. Refuses NO_RUN."""

    # -- engines and processes
    async def register(self, peer: Peer, ttl_ms: int) -> None:
        """Register a live process for `ttl_ms`."""

    async def unregister(self, incarnation: str, *, refuted: bool = False) -> None:
        """Remove a process; its leases expire. A `refuted` process gets no more; its leases are released."""

    async def peers(self, role: str | None = None) -> Sequence[Peer]:
        """Return the registered processes, of one role or of all."""

    async def endpoints(self, topic: str) -> Mapping[str, str]:
        """Return the endpoints of `topic` by incarnation. Cheap; may include dead processes."""

    async def applied(self, engine: str, epoch: str, version: int) -> None:
        """Record that an engine serves (epoch, version).

        A smaller version than the recorded one of the same incarnation and epoch is ignored. Refuses REFUTED;
        STALE_EPOCH if `epoch` is not on the current branch; WRONG_STATE if `version` is not committed.
        """

    async def lease(
        self, *, request: str, engine: str, holder: str, lease_ms: int, groups: int = -1
    ) -> Lease:
        """Lease the next group: WAITING and expired groups first, then a new group.

        Repeated calls with the same `request` return the same lease. Refuses BOUND, PENDING, DONE, EXHAUSTED,
        DRAINING, HALTED, REFUTED, STALE_ENGINE, ARCHIVE_BEHIND; BUSIER by `groups` (-1: never), see
        lease.lua.
        """

    async def extend(self, group: int, token: str, lease_ms: int) -> None:
        """Set the end of a lease to `lease_ms` from now. Refuses NOT_HELD; BOUND if expired without room."""

    async def release(self, group: int, token: str, reason: str) -> None:
        """Return a group for another lease; its attempts stay counted. Refuses NOT_HELD, WRONG_STATE."""

    async def accept(
        self, group: int, token: str, counts: Mapping[int, int], reward: float | None = None
    ) -> TakenGroup:
        """Record that the spool holds the group's record; return the group as listed in batches.

        `counts` is the number of sampled tokens by version, `reward` the mean over the samples, for the event
        log. Refuses NOT_HELD, UNKNOWN_GROUP, WRONG_STATE; DUPLICATE for a finished, forgotten group; BOUND if
        the lease had expired and rule F leaves no room for the group.
        """

    async def lost(self, group: int, token: str) -> None:
        """Return a SCORED group to WAITING, because the spool lacks its record."""

    async def drop(self, group: int, token: str, reason: str, wasted: int = 0, detail: str = "") -> None:
        """Drop a group for `reason`, one word; `detail` explains. Refuses NOT_HELD, WRONG_STATE (TAKEN)."""

    async def filter(self, group: int, token: str, tokens: int, reward: float, max_batches: int) -> None:
        """Drop a LEASED group that the ingest filters out, and free its place in rule F.

        The drop reason is `no_signal`, which `drop_share` ignores. The run halts once the groups filtered
        since the last commit would fill `max_batches` steps; 0: never. An accepted group does not change.
        Refuses NOT_HELD, UNKNOWN_GROUP; DUPLICATE for a finished, forgotten group.

        Args:
            group: number of the group.
            token: current lease token of the group.
            tokens: number of sampled tokens of the group, counted as wasted.
            reward: mean over the samples, for the event log.
            max_batches: limit of filtered groups, in steps.
        """

    # -- the trainer
    async def claim(self, epoch: str) -> LedgerStatus:
        """Fence older epochs, and return TAKEN groups to SCORED. Refuses STALE_EPOCH for a fenced epoch."""

    async def resume(self, epoch: str, version: int, digest: int) -> bool:
        """Declare that the trainer of `epoch` is at `version`, with weights of `digest`.

        Call once after `claim`, before `take`. Returns True if the branch continues: same version and digest,
        or no committed version yet. Returns False if the ledger was rewound to `version`. Each group
        generated or trained on the abandoned branch is then WAITING with no attempts counted, and engines get
        leases only once they serve the new epoch. Refuses STALE_EPOCH; WRONG_STATE if `version` is ahead of
        the ledger, older than the last `checkpointed` one, or differs from this epoch's earlier `resume`.
        """

    async def take(self, epoch: str) -> TakenBatch:
        """Take the batch of the next step; return the same batch while that step runs.

        The batch is short only if no more groups can arrive. Either the prompts are exhausted and no group is
        LEASED or WAITING, or a pending bound or a drain stops leasing and no live lease is left. Groups
        dropped by a refused take stay dropped; the next batch reports them.

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

        `trained` is the number of tokens with a gradient, by group and version. Returns the new version, also
        when repeated. Refuses STALE_EPOCH, STALE_STEP, WRONG_STATE for other groups or more tokens than
        accepted, BOUND for tokens over the bound.
        """

    async def publish(self, epoch: str, manifest: bytes, version: int) -> None:
        """Set the manifest of any committed version without a commit. Refuses STALE_EPOCH, WRONG_STATE."""

    async def manifest(self) -> bytes | None:
        """Return the newest published manifest, an encoded `WeightManifest`; None before the first."""

    async def step_records(self, first: int) -> Sequence[StepRecord]:
        """Return the committed steps >= `first` that no checkpoint covers, in order."""

    async def reports(self, first: int) -> Sequence[bytes]:
        """Return the encoded `StepReport`s of the committed steps >= `first`, in order."""

    async def checkpointed(self, version: int) -> None:
        """Forget records and reports of all steps below `version`, which a durable checkpoint covers.

        Unregistered engines that serve an older version are forgotten, too.
        """

    async def ended(self, groups: Collection[int]) -> set[int]:
        """Return the subset of `groups` that is final: DROPPED, or finished and forgotten."""

    async def halt(self, epoch: str, cause: str) -> None:
        """Stop granting leases until `drain(False)`; the first cause is kept. Refuses STALE_EPOCH."""

    async def set_bound(
        self,
        *,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
        policy: Policy | None = None,
    ) -> Bound | None:
        """Request another bound. Returns None if it is in force, else the pending bound."""

    async def drain(self, on: bool = True) -> None:
        """Stop or resume leasing. Resuming ends a halt and resets the counts of drops and attempts."""

    async def events(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return at most `limit` events numbered above `after`, oldest first, as JSON values of the log."""

    async def archived(self, sequence: int) -> None:
        """Forget archived events up to `sequence`."""

    async def close(self) -> None:
        """Close connections."""
