"""Defines the events of a run: one struct per kind, as every ledger appends them to its log.

Each state change appends one event. `seq` counts from 1 without gaps over the life of the run; only a
`rebuild` may skip numbers. The JSON of an event has its kind in the field `event` and omits empty lists.
Digests are decimal strings, because JSON numbers are exact only up to 53 bits. Counts have string keys. The
archive adds the field `chain` at the end of each line (see `hash_chain.py`).

Decoding ignores undeclared fields, so that an older version can read the log of a newer one.
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
    """Number of the event, set by the ledger."""
    time_ms: int = 0
    """Unix time of the ledger server's clock in ms, set by the ledger."""

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
    """Token of the lease; empty if a waiting group is dropped."""


# -- the run


class CreateEvent(LedgerEvent, frozen=True, kw_only=True, tag="create"):
    """The run was created."""

    fingerprint: str
    """Fingerprint of the prompt stream."""
    prompts: int
    """Number of prompts in the stream over all passes; -1 for an infinite stream."""
    steps: int
    """Steps after which the run is done."""
    max_staleness: int
    """E of the bound in force, in versions."""
    groups_per_step: int
    """B of the bound in force."""
    policy: Policy
    """Policy of the bound in force."""


class StepsEvent(LedgerEvent, frozen=True, kw_only=True, tag="steps"):
    """The number of steps of the run changed."""

    steps: int
    """Steps after which the run is done."""


class BoundPendingEvent(LedgerEvent, frozen=True, kw_only=True, tag="bound_pending"):
    """A bound was requested that rule F does not allow yet. No lease is granted until it is in force."""

    max_staleness: int
    """Requested E, in versions."""
    groups_per_step: int
    """Requested B."""
    policy: Policy
    """Requested policy."""


class BoundEvent(LedgerEvent, frozen=True, kw_only=True, tag="bound"):
    """Another bound is in force, or a pending bound was withdrawn."""

    max_staleness: int
    """E in force, in versions."""
    groups_per_step: int
    """B in force."""
    policy: Policy
    """Policy in force."""


class DrainEvent(LedgerEvent, frozen=True, kw_only=True, tag="drain"):
    """Leasing was stopped or resumed."""

    on: bool
    """Whether leasing is stopped."""


class HaltEvent(LedgerEvent, frozen=True, kw_only=True, tag="halt"):
    """Leasing stopped: one drop reason exceeds its share of recent drops, or the trainer requested it."""

    reason: str
    """Drop reason, or the trainer's cause."""


class UnhaltEvent(LedgerEvent, frozen=True, kw_only=True, tag="unhalt"):
    """Leasing resumed; counts of drops, and of attempts of WAITING and LEASED groups, restart at 0."""

    reason: str
    """Reason of the halt that ended."""


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
    """E in force, in versions; fixed for the duration of the lease."""
    groups_per_step: int
    """B in force."""
    policy: Policy
    """Policy in force."""
    attempt: int
    """Number of leases of the group, including this one."""


class ExpireEvent(GroupEvent, frozen=True, kw_only=True, tag="expire"):
    """A lease expired and lost its place in rule F; it stays valid until the group is leased again."""


class ExtendEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="extend"):
    """An expired lease regained its place in rule F. Extending a live lease appends no event."""


class ReleaseEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="release"):
    """LEASED -> WAITING, released by the holder."""

    reason: str
    """Reason given by the holder."""


class AcceptEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="accept"):
    """LEASED -> SCORED."""

    counts: dict[int, int]
    """Sampled tokens by version."""
    reward: float | None = None
    """Mean over the samples; omitted if the ingest did not report it."""


class LostEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="lost"):
    """SCORED -> WAITING: the spool lacks the record."""


class DropEvent(LeasedGroupEvent, frozen=True, kw_only=True, tag="drop"):
    """WAITING, LEASED or SCORED -> DROPPED."""

    reason: str
    """Drop reason for the counters."""
    detail: str
    """Explanation, such as the error of a failed group; empty if the reason suffices."""
    wasted_tokens: int
    """Number of reported sampled tokens of the group."""
    from_state: GroupState = msgspec.field(name="from")
    """State before the drop."""
    reward: float | None = None
    """Mean over the samples of a group without signal; omitted for other reasons."""


# -- the trainer


class ClaimEvent(LedgerEvent, frozen=True, kw_only=True, tag="claim"):
    """A new trainer took the run over; the groups of a running step moved TAKEN -> SCORED."""

    epoch: str
    """Epoch of the new trainer."""
    untaken: list[int] = msgspec.field(default_factory=list)
    """Groups of the step that was running."""


class ResumeEvent(LedgerEvent, frozen=True, kw_only=True, tag="resume"):
    """The trainer continued the branch or rewound the run: groups of the abandoned branch -> WAITING."""

    epoch: str
    """Epoch of the trainer."""
    version: int
    """Version of the trainer's model."""
    digest: str
    """Digest of the trainer's weights."""
    continued: bool
    """Whether the branch continues; false for a rewind to `version`."""
    waiting: list[int] = msgspec.field(default_factory=list)
    """Groups undone by the rewind."""


class TakeEvent(LedgerEvent, frozen=True, kw_only=True, tag="take"):
    """SCORED -> TAKEN, for all groups in the batch of a step."""

    epoch: str
    """Epoch of the trainer."""
    step: int
    """Number of the step: the version from which it starts."""
    groups: list[int]
    """Groups of the batch, in order of (deadline, group)."""


class CommitEvent(LedgerEvent, frozen=True, kw_only=True, tag="commit"):
    """TAKEN -> TRAINED, for all groups of the running step."""

    epoch: str
    """Epoch of the trainer."""
    step: int
    """Number of the step."""
    version: int
    """The new version, `step` + 1."""
    digest: str
    """Digest of the new version's weights."""
    groups: dict[int, dict[int, int]]
    """Group -> number of tokens with a gradient, by version."""
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
    """The ledger lost writes and was rebuilt; leased and taken groups were returned.

    The events after `after` are lost, except for the accepts and commits in `journal_events`.
    """

    epoch: str
    """New epoch, which fences the trainer that held the run."""
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
    """Accepts and commits found only in the journal, oldest first."""


# -- any other entry


class UnknownEvent(LedgerEvent, frozen=True, kw_only=True):
    """An event of a kind that this version does not know. Only results from decoding."""

    name: str
    """Kind of the event."""

    @property
    def kind(self) -> str:
        return self.name


class MalformedEvent(LedgerEvent, frozen=True, kw_only=True):
    """A line that is not an event. Only results from decoding."""

    name: str
    """Kind given in the line; empty without a kind."""
    problem: str
    """Why the line is malformed."""
    is_object: bool = True
    """Whether the line is a JSON object."""

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
    """Return the event in a JSON line; an `UnknownEvent` or `MalformedEvent` if it cannot be decoded."""
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
    """Return the event with these JSON values, as listed by `Ledger.events`; else as `decode_line`."""
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


def event_bound(event: CreateEvent | BoundPendingEvent | BoundEvent) -> Bound:
    """Return the bound stated by an event."""
    return Bound(event.max_staleness, event.groups_per_step, event.policy)
