"""Defines the events of a run: one struct per kind, as every ledger appends them to its log.

Each state change appends one event. `seq` counts up without gaps from 1 over the life of the run; only a
`rebuild` may skip numbers. The JSON of an event has its kind in the field `event`, and leaves empty lists
out; digests are decimal strings, because JSON numbers end at 53 bits; counts have string keys. The archive
adds one field, `chain`, at the end of each line (see `hash_chain.py`).

Decoding ignores fields that are not declared here, so that an older version reads the log of a newer one.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy
from services.ledger.interface import JournalEvent


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """One state change of a run."""

    seq: int = 0
    """Number of the event; the ledger that appends it sets it."""
    time_ms: int = 0
    """Unix time in ms on the clock of the ledger's server; the ledger that appends the event sets it."""

    @property
    def kind(self) -> str:
        """The value of the field `event`."""
        return str(self.__struct_config__.tag)


class GroupEvent(LedgerEvent, frozen=True, kw_only=True):
    """A state change of one group."""

    group: int
    """Number of the group."""


class LeasedGroupEvent(GroupEvent, frozen=True, kw_only=True):
    """A state change of one group, under a lease."""

    token: str
    """Token of the lease; empty if the group was dropped while it waited."""


# -- the run


class CreateEvent(LedgerEvent, frozen=True, kw_only=True, tag="create"):
    """The run exists."""

    fingerprint: str
    """Fingerprint of the prompt stream."""
    prompts: int
    """Prompts in the stream, all passes counted; -1 if it has no end."""
    steps: int
    """Steps after which the run is done."""
    max_staleness: int
    """E of the bound in force, in versions."""
    groups_per_step: int
    """B of the bound in force."""
    policy: Policy
    """Policy of the bound in force."""


class StepsEvent(LedgerEvent, frozen=True, kw_only=True, tag="steps"):
    """The run has another length."""

    steps: int
    """Steps after which the run is done."""


class BoundPendingEvent(LedgerEvent, frozen=True, kw_only=True, tag="bound_pending"):
    """A bound was asked for that rule F does not allow yet. No lease is granted until it is in force."""

    max_staleness: int
    """E asked for, in versions."""
    groups_per_step: int
    """B asked for."""
    policy: Policy
    """Policy asked for."""


class BoundEvent(LedgerEvent, frozen=True, kw_only=True, tag="bound"):
    """Another bound is in force, or a pending one was taken back."""

    max_staleness: int
    """E in force, in versions."""
    groups_per_step: int
    """B in force."""
    policy: Policy
    """Policy in force."""


class DrainEvent(LedgerEvent, frozen=True, kw_only=True, tag="drain"):
    """Granting of leases was stopped, or allowed again."""

    on: bool
    """Whether leases are stopped."""


class HaltEvent(LedgerEvent, frozen=True, kw_only=True, tag="halt"):
    """Leasing has stopped: one reason has too large a share of the recent drops, or the trainer asked."""

    reason: str
    """That reason, or the cause that the trainer named."""


class UnhaltEvent(LedgerEvent, frozen=True, kw_only=True, tag="unhalt"):
    """Leases are granted again; drops, and attempts of WAITING and LEASED groups, are counted from 0."""

    reason: str
    """Reason of the halt that ends."""


# -- engines and groups


class AppliedEvent(LedgerEvent, frozen=True, kw_only=True, tag="applied"):
    """An engine serves a version."""

    engine: str
    """Incarnation of the engine."""
    epoch: str
    """Epoch that committed or published the version."""
    version: int
    """Version served."""


class LeaseEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="lease"):
    """New, WAITING or expired -> LEASED."""

    holder: str
    """Incarnation of the process that holds the lease."""
    engine: str
    """Incarnation of the engine that the lease is for."""
    epoch: str
    """Epoch that the engine serves."""
    version: int
    """Version that the engine serves."""
    deadline: int
    """`version` + `bound`."""
    bound: int
    """E in force, in versions; it holds for this lease until it ends."""
    groups_per_step: int
    """B in force."""
    policy: Policy
    """Policy in force."""
    attempt: int
    """Leases of the group so far, this one counted."""


class ExpireEvent(GroupEvent, frozen=True, kw_only=True, tag="expire"):
    """A lease ran out and gave up its place in rule F; it stays valid until the group is leased again."""


class ExtendEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="extend"):
    """An expired lease has its place in rule F again. Extending a live lease is no event."""


class ReleaseEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="release"):
    """LEASED -> WAITING, by the holder."""

    reason: str
    """Why, as the holder says."""


class AcceptEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="accept"):
    """LEASED -> SCORED."""

    counts: dict[int, int]
    """Sampled tokens by version."""
    reward: float | None = None
    """Mean over the samples; left out if the ingest did not say it."""


class LostEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="lost"):
    """SCORED -> WAITING: the spool does not hold the record."""


class DropEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="drop"):
    """WAITING, LEASED or SCORED -> DROPPED."""

    reason: str
    """Drop reason that is counted."""
    detail: str
    """What led to it, such as the error of a group that failed; empty where the reason says all."""
    wasted_tokens: int
    """Sampled tokens of the group, as far as they were reported."""
    from_state: GroupState = msgspec.field(name="from")
    """State before the drop."""
    reward: float | None = None
    """Mean over the samples of a group without signal; left out for other reasons."""


# -- the trainer


class ClaimEvent(LedgerEvent, frozen=True, kw_only=True, tag="claim"):
    """A new trainer took the run over; the groups of a running step went TAKEN -> SCORED."""

    epoch: str
    """Epoch of the new trainer."""
    untaken: list[int] = msgspec.field(default_factory=list)
    """Groups of the step that was running."""


class ResumeEvent(LedgerEvent, frozen=True, kw_only=True, tag="resume"):
    """The trainer continues the branch, or rewinds the run: groups of the abandoned branch -> WAITING."""

    epoch: str
    """Epoch of the trainer."""
    version: int
    """Version that it stands at."""
    digest: str
    """Digest of its weights."""
    continued: bool
    """Whether the branch continues; false: a rewind to `version`."""
    waiting: list[int] = msgspec.field(default_factory=list)
    """Groups undone by the rewind."""


class TakeEvent(LedgerEvent, frozen=True, kw_only=True, tag="take"):
    """SCORED -> TAKEN, for the batch of a step."""

    epoch: str
    """Epoch of the trainer."""
    step: int
    """The step, which is the version that it starts from."""
    groups: list[int]
    """The batch, in order of (deadline, group)."""


class CommitEvent(LedgerEvent, frozen=True, kw_only=True, tag="commit"):
    """TAKEN -> TRAINED, for all groups of the running step."""

    epoch: str
    """Epoch of the trainer."""
    step: int
    """The step."""
    version: int
    """The new version, `step` + 1."""
    digest: str
    """Digest of its weights."""
    groups: dict[int, dict[int, int]]
    """Group -> tokens that carried gradient by version."""
    issued: int
    """Groups ever leased."""
    trained: int
    """Groups that are TRAINED."""
    dropped: int
    """Groups that are DROPPED."""
    active: int
    """Groups in any other state."""


class PublishEvent(LedgerEvent, frozen=True, kw_only=True, tag="publish"):
    """The trainer set a manifest without a commit."""

    epoch: str
    """Epoch of the trainer."""
    version: int
    """Version of the manifest: the committed one, or an older one that engines are to serve."""


class CheckpointEvent(LedgerEvent, frozen=True, kw_only=True, tag="checkpoint"):
    """A durable checkpoint covers all steps below a version."""

    version: int
    """Version of the checkpoint."""


class RebuildEvent(LedgerEvent, frozen=True, kw_only=True, tag="rebuild"):
    """The ledger lost writes and was rebuilt: leased and taken groups went back.

    The events after `after` are lost, except for the accepts and commits in `journal_events`.
    """

    epoch: str
    """A new epoch, which fences the trainer that held the run."""
    after: int
    """Number of the last event that was not lost."""
    version: int
    """Committed version."""
    issued: int
    """Groups ever leased."""
    trained: int
    """Groups that are TRAINED."""
    dropped: int
    """Groups that are DROPPED."""
    scored: list[int] = msgspec.field(default_factory=list)
    """Groups that are SCORED."""
    waiting: list[int] = msgspec.field(default_factory=list)
    """Groups that are WAITING."""
    journal_events: list[JournalEvent] = msgspec.field(name="told", default_factory=list)
    """Accepts and commits that only the journal knew, oldest first."""


# -- any other entry


class UnknownEvent(LedgerEvent, frozen=True, kw_only=True):
    """An event of a kind that this version does not know; never written."""

    name: str
    """Its kind."""

    @property
    def kind(self) -> str:
        return self.name


class MalformedEvent(LedgerEvent, frozen=True, kw_only=True):
    """A line that is not an event; never written."""

    name: str
    """The kind that it says it has, if it says one."""
    problem: str
    """Reason why it is malformed."""
    is_object: bool = True
    """Whether it is a JSON object at all."""

    @property
    def kind(self) -> str:
        return self.name


KnownEvent = (
    CreateEvent | StepsEvent | BoundPendingEvent | BoundEvent | DrainEvent | HaltEvent | UnhaltEvent
    | AppliedEvent | LeaseEvent | ExpireEvent | ExtendEvent | ReleaseEvent | AcceptEvent | LostEvent
    | DropEvent | ClaimEvent | ResumeEvent | TakeEvent | CommitEvent | PublishEvent | CheckpointEvent
    | RebuildEvent
)  # fmt: skip
KINDS = frozenset(str(kind.__struct_config__.tag) for kind in KnownEvent.__args__)
"""Values of the field `event`."""
_DECODER = msgspec.json.Decoder(KnownEvent)


def decode_line(line: bytes) -> LedgerEvent:
    """Return the event in a line of JSON; an `UnknownEvent` or a `MalformedEvent` if it is none of ours."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError):  # a MsgspecError is a ValueError
        pass
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return MalformedEvent(name="", problem="the line is not an event", is_object=False)
    return decode_fields(fields)


def decode_fields(fields: Mapping[str, Any]) -> LedgerEvent:
    """Return the event with these JSON values, as `Ledger.events` lists it; see `decode_line`."""
    kind = fields.get("event")
    seq, time_ms = (
        value if type(value) is int else 0 for value in (fields.get("seq"), fields.get("time_ms"))
    )
    if not isinstance(kind, str) or kind not in KINDS:
        return UnknownEvent(seq=seq, time_ms=time_ms, name=str(kind))
    try:
        return msgspec.convert(fields, KnownEvent, str_keys=True)
    except (ValueError, RecursionError) as error:
        return MalformedEvent(seq=seq, time_ms=time_ms, name=kind, problem=f"malformed: {error}")


def bound_of(event: CreateEvent | BoundPendingEvent | BoundEvent) -> Bound:
    """Return the bound that an event states."""
    return Bound(event.max_staleness, event.groups_per_step, event.policy)
