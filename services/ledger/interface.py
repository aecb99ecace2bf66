"""What every ledger does: the Redis one (`ledger.py`) and the oracle in memory (`memory.py`) pass one contract suite.

A method either takes effect whole or raises `Refused` and changes nothing. Calling one again after a lost reply is harmless:
the second call returns what the first one did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.errors import SettingsError
from protocol.lifecycle import GroupState
from protocol.ranges import check_range
from protocol.staleness import Bound, Policy


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run is. Creating it twice with equal values is harmless, with another fingerprint refused."""

    run: str
    fingerprint: str
    """Fingerprint of the prompt stream; group g is prompt g of it."""
    prompts: int | None
    """Prompts in the stream, all passes counted; None if it has no end."""
    steps: int
    """Steps after which the run is done."""
    bound: Bound
    max_attempts: int = 5
    """Leases of one group before it is dropped (`attempts`)."""
    drop_share: float = 0.9
    """Share of the last `drop_window` finished groups that one drop reason may have before the run halts."""
    drop_window: int = 64


@dataclass(frozen=True, slots=True)
class Lease:
    """A group to generate."""

    group: int
    token: str
    epoch: str
    version: int
    """The version that the holder's engine had acknowledged when the lease was granted."""
    deadline: int
    """version + max_staleness."""
    max_staleness: int
    """The bound in force when the lease was granted; it holds for this lease for good."""
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
    counts: Mapping[int, int]
    """Sampled tokens per version, as accepted."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The batch of one step."""

    step: int
    """The version that the step starts from."""
    groups: tuple[TakenGroup, ...]
    """In order of (deadline, group)."""
    dropped: tuple[int, ...] = ()
    """Groups given up on the way to this take (`straggler`, `stale`), to be aborted."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the ledger knows of a committed step that no durable checkpoint covers yet."""

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
    """A change that waits until rule F holds with it."""
    steps: int
    issued: int
    trained: int
    dropped: int
    states: Mapping[GroupState, int]
    """Active groups by state; WAITING, LEASED, SCORED, TAKEN."""
    dropped_by_reason: Mapping[str, int]
    wasted_tokens: int
    """Sampled tokens of dropped groups, as far as they were reported."""
    halted: str = ""
    """Why leasing has stopped until `drain(False)`; empty while the run is on."""
    draining: bool = False
    engines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Engine incarnation -> (epoch, version) that it last acknowledged."""

    @property
    def active(self) -> int:
        return sum(self.states.values())

    @property
    def done(self) -> bool:
        return self.version >= self.steps


@dataclass(frozen=True, slots=True)
class Head:
    """Where a run stands, without what grows with the number of engines."""

    epoch: str
    """That of the last claim; empty before the first."""
    version: int
    sequence: int
    """Number of the last event."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of a run; `services/ledger_recovery/restore.py` makes it, `Ledger.rebuild` writes it."""

    epoch: str
    """A new one, nobody's: it fences whoever held the run."""
    epochs: tuple[str, ...]
    """Every one that ever claimed the run."""
    found: int
    """Number of the last event when the ledger was looked at; -1 if the run was not there."""
    after: int
    """Number of the last event in the archive; those up to `sequence` are lost."""
    sequence: int
    """Highest number that anybody noted; events go on above it."""
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
    """Every other active group -> leases that it had."""
    attempts: Mapping[int, int]
    """The same for scored and trained groups, where it is not 1."""
    steps: tuple[StepRecord, ...]
    """Committed steps that no checkpoint covers."""
    reports: Mapping[int, bytes]
    told: tuple[Mapping[str, Any], ...] = ()
    """Accepts and commits that only the journal knew, as events."""


class Ledger(Protocol):
    """See the module docstring. Times are milliseconds of the ledger's own clock."""

    async def create(self, spec: RunSpec) -> None:
        """Refuses RUN_MISMATCH. `steps` of an existing run may be raised, never lowered below its version."""

    async def rebuild(self, spec: RunSpec, snapshot: Snapshot) -> None:
        """Hold what `snapshot` says, and nothing else: no lease, no running step, no engine that may lease.
        `spec.bound` is the bound in force.

        Repeating it with the same epoch changes nothing. Refuses WRONG_STATE if an event was written since `snapshot.found`."""

    async def status(self) -> LedgerStatus:
        """Refuses NO_RUN."""

    async def head(self) -> Head:
        """Cheap to ask again and again. Refuses NO_RUN."""

    # -- engines and processes ---------------------------------------------------------------------------------------
    async def register(self, peer: Peer, ttl_ms: int) -> None:
        """Say that a process lives; to be repeated before `ttl_ms` is over."""

    async def unregister(self, incarnation: str) -> None: ...

    async def peers(self, role: str | None = None) -> Sequence[Peer]:
        """Processes whose time-to-live is not over."""

    async def endpoints(self, topic: str) -> Mapping[str, str]:
        """Endpoints by incarnation of the processes that said in their `info["endpoints"]` that they serve `topic`. Cheap to ask again
        and again. One whose time is over may be named until another process registers."""

    async def applied(self, engine: str, epoch: str, version: int) -> None:
        """Record that an engine serves (epoch, version). Refuses STALE_EPOCH if `epoch` is off the current branch,
        WRONG_STATE if `version` is not committed.

        A version smaller than the one recorded for the same incarnation and epoch is ignored."""

    # -- a group's life ----------------------------------------------------------------------------------------------
    async def lease(self, *, request: str, engine: str, holder: str, lease_ms: int) -> Lease:
        """Lease the next group: a WAITING or expired one first, else a new one. `request` makes repeats harmless.

        Refuses BOUND, PENDING, DONE, EXHAUSTED, DRAINING, HALTED, STALE_ENGINE, ARCHIVE_BEHIND."""

    async def extend(self, group: int, token: str, lease_ms: int) -> None:
        """Refuses NOT_HELD, also after the group was dropped or accepted under another token."""

    async def release(self, group: int, token: str, reason: str) -> None:
        """Hand a group back, to be leased again (it keeps its attempt count). Refuses NOT_HELD, WRONG_STATE."""

    async def accept(
        self, group: int, token: str, counts: Mapping[int, int], reward: float | None = None
    ) -> TakenGroup:
        """The spool holds the group's record. `counts`: sampled tokens per version; `reward`: mean over its samples, for the event log.

        Returns the group as batches list it; accepting the same token again does, too. Refuses NOT_HELD, UNKNOWN_GROUP, WRONG_STATE;
        BOUND if the lease had expired and rule F leaves no room for the group any more."""

    async def lost(self, group: int, token: str) -> None:
        """The spool does not have a SCORED group's record: it is leased again."""

    async def drop(self, group: int, token: str, reason: str, wasted_tokens: int = 0) -> None:
        """Give up a group. `token` is that of the current lease. Refuses NOT_HELD, WRONG_STATE (never a TAKEN group)."""

    # -- the trainer -------------------------------------------------------------------------------------------------
    async def claim(self, epoch: str) -> LedgerStatus:
        """A new trainer takes the run over: older epochs are fenced, TAKEN groups go back to SCORED. Refuses STALE_EPOCH for an epoch
        that was fenced before."""

    async def resume(self, epoch: str, version: int, digest: int) -> bool:
        """The trainer of `epoch` stands at `version` with weights of `digest`. True: the branch continues (same version, same
        digest, or nothing committed yet). False: the ledger was rewound to `version`; everything generated or trained under
        an abandoned version is WAITING again, with no attempts counted, and engines get leases only once they serve the new epoch.

        To be called once after `claim`, before `take`. Refuses STALE_EPOCH; WRONG_STATE if `version` is ahead of the ledger, older
        than the last `checkpointed` one, or differs from what this epoch resumed at before."""

    async def take(self, epoch: str) -> Taken:
        """The batch of the next step; again the same one while that step runs.

        Refuses NOT_ENOUGH, STRAGGLER (`detail` is the group), STALE_EPOCH, WRONG_STATE before `resume`, DONE after the last step,
        EXHAUSTED if nothing is left to take. A short batch only if no more groups can come: the prompts have run out and nothing is
        LEASED or WAITING, or a pending bound or a drain stops leasing and no live lease is left. Groups dropped on the way stay
        dropped after a refusal; the next batch reports them."""

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
        """All groups of the running step are trained. `trained`: group -> tokens that carried gradient per version. Returns the new
        version. Refuses STALE_EPOCH, STALE_STEP; repeating a commit of the same epoch and step returns the version."""

    async def publish(self, epoch: str, manifest: bytes, version: int) -> None:
        """Set the current manifest without a commit (version 0, or after a resume). Refuses STALE_EPOCH."""

    async def manifest(self) -> bytes | None:
        """The newest published manifest, as an encoded `WeightManifest`."""

    async def step_records(self, first: int) -> Sequence[StepRecord]:
        """Committed steps >= `first`, in order."""

    async def reports(self, first: int) -> Sequence[bytes]:
        """Encoded `StepReport`s of committed steps >= `first` that no checkpoint covers, in order."""

    async def checkpointed(self, version: int) -> None:
        """A durable checkpoint covers all steps below `version`: their records and reports are forgotten, and so is what engines that
        are not registered any more acknowledged before it."""

    # -- settings ----------------------------------------------------------------------------------------------------
    async def set_bound(
        self,
        *,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
        policy: Policy | None = None,
    ) -> Bound | None:
        """Ask for a change. Returns None if it is in force, else the bound that is pending."""

    async def drain(self, on: bool = True) -> None:
        """Stop granting leases, or grant them again; the latter also lets a halted run go on: drops, and attempts of WAITING and LEASED
        groups, are counted anew."""

    # -- the event log -----------------------------------------------------------------------------------------------
    async def events(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        """Events with a sequence number > `after`, oldest first: {seq, time_ms, event, ...} (see `services/ledger/event_log/archiver.py`)."""

    async def archived(self, sequence: int) -> None:
        """Events up to `sequence` are in the archive and may be forgotten here."""

    async def close(self) -> None: ...


ARCHIVE_LIMIT = 200_000
"""Events that may wait for the archive before leasing stops."""


def check_bound(max_staleness: int | None, groups_per_step: int | None) -> None:
    """Raise SettingsError for a bound that no run can have."""
    for name, value in (("max_staleness", max_staleness), ("groups_per_step", groups_per_step)):
        if value is not None:
            check_range(Bound, name, value, name)


def check_spec(spec: RunSpec) -> None:
    """Raise SettingsError for a run that cannot be."""
    check_bound(spec.bound.max_staleness, spec.bound.groups_per_step)
    if (
        spec.steps < 0
        or spec.max_attempts < 1
        or spec.drop_window < 1
        or (spec.prompts is not None and spec.prompts < 0)
    ):
        raise SettingsError(
            f"run {spec.run}: steps and prompts are 0 or more, max_attempts and drop_window 1 or more"
        )
    if not 0 < spec.drop_share <= 1:
        raise SettingsError(f"drop_share is {spec.drop_share}; it is a share, above 0 and at most 1")
