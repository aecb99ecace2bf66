"""What the scripts answer in JSON, as the values of the interface. What does not fit them is a
ProtocolError."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from protocol.errors import ProtocolError
from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy
from services.ledger.interface import Lease, LedgerStatus, Peer, Snapshot, StepRecord, Taken, TakenGroup

T = TypeVar("T")
_SNAPSHOT_AS_IT_IS = (
    "epoch", "epochs", "found", "after", "sequence", "version", "checkpoint", "issued", "trained", "dropped", "wasted_tokens", "reasons",
    "halted", "told",
)  # fmt: skip


class _Peer(msgspec.Struct):
    role: str
    info: dict[str, Any]


class _Step(msgspec.Struct):
    step: int
    epoch: str
    digest: int
    groups: tuple[TakenGroup, ...]


class _Status(msgspec.Struct):
    version: int
    epoch: str
    sequence: int
    bound: Bound
    steps: int
    issued: int
    trained: int
    dropped: int
    states: dict[GroupState, int]
    dropped_by_reason: dict[str, int]
    wasted_tokens: int
    halted: str
    draining: bool
    engines: dict[str, str]
    """Engine -> epoch and version, with a space between."""
    pending: Bound | None = None


def encode_counts(counts: Mapping[int, int]) -> dict[str, int]:
    """Tokens per version with string keys, as JSON has them."""
    return {str(version): n for version, n in counts.items()}


def decode_counts(counts: Mapping[str, int]) -> dict[int, int]:
    """The inverse of `encode_counts`."""
    return {int(version): n for version, n in counts.items()}


def decode_bound(values: Mapping[str, Any]) -> Bound:
    """A bound as events write it."""
    return Bound(values["max_staleness"], values["groups_per_step"], Policy(values["policy"]))


def decode_lease(data: bytes) -> Lease:
    """The answer of `lease`."""
    return _read(data, Lease)


def decode_taken(data: bytes) -> Taken:
    """The answer of `take`."""
    return _read(data, Taken)


def decode_step(data: bytes) -> StepRecord:
    """A committed step as `commit` stores it."""
    record = _read(data, _Step)
    return StepRecord(record.step, record.epoch, record.digest, record.groups)


def decode_peer(incarnation: bytes, data: bytes) -> Peer:
    """A pair of the answer of `peers`."""
    record = _read(data, _Peer)
    return Peer(record.role, incarnation.decode(errors="replace"), record.info)


def encode_peer(peer: Peer) -> bytes:
    """What `register` stores."""
    return msgspec.json.encode({"role": peer.role, "info": dict(peer.info)})


def encode_endpoints(peer: Peer) -> bytes:
    """What `register` stores of where a process serves which topic; empty if it serves none."""
    endpoints = peer.info.get("endpoints")
    return msgspec.json.encode(endpoints, order="sorted") if endpoints else b""


def decode_endpoints(data: Mapping[bytes, bytes]) -> dict[str, dict[str, str]]:
    """The hash `endpoints`, as topic -> incarnation -> endpoint. The field without a name is no process."""
    topics: dict[str, dict[str, str]] = {}
    for incarnation, served in data.items():
        if incarnation:
            for topic, endpoint in _read(served, dict[str, str]).items():
                topics.setdefault(topic, {})[incarnation.decode(errors="replace")] = endpoint
    return topics


def decode_status(data: bytes) -> LedgerStatus:
    """The answer of `status` and `claim`."""
    record = _read(data, _Status)
    values = {name: getattr(record, name) for name in _Status.__struct_fields__}
    return LedgerStatus(
        **{**values, "engines": {engine: _served(text) for engine, text in record.engines.items()}}
    )


def encode_snapshot(snapshot: Snapshot) -> list[bytes | int]:
    """What `rebuild` gets: JSON, then step and report by turns."""
    values = {
        **{name: getattr(snapshot, name) for name in _SNAPSHOT_AS_IT_IS},
        "draining": int(snapshot.draining),
        "digest": "" if snapshot.digest is None else str(snapshot.digest),
        "scored": [_encode_group(group) for group in snapshot.scored],
        "waiting": [{"group": group, "attempt": attempt} for group, attempt in snapshot.waiting.items()],
        "attempts": encode_counts(snapshot.attempts),
        "steps": [
            {
                "step": step.step,
                "epoch": step.epoch,
                "digest": str(step.digest),
                "groups": [_encode_group(group) for group in step.groups],
            }
            for step in snapshot.steps
        ],
    }
    return [msgspec.json.encode(values), *(item for report in snapshot.reports.items() for item in report)]


def decode_group(data: bytes) -> TakenGroup:
    """The answer of `accept`."""
    return _read(data, TakenGroup)


def _encode_group(group: TakenGroup) -> dict[str, Any]:
    return {**dataclasses.asdict(group), "counts": encode_counts(group.counts)}


def decode_event(data: bytes) -> dict[str, Any]:
    """One event of the log."""
    return _read(data, dict[str, Any])


def _served(text: str) -> tuple[str, int]:
    epoch, _, version = text.rpartition(" ")
    try:
        return epoch, int(version)
    except ValueError:
        raise ProtocolError(
            f"ledger record: an engine serves {text[:80]!r}, not an epoch and a version"
        ) from None


def _read(data: bytes, kind: type[T]) -> T:
    """`data` as `kind`. Lua writes whole numbers as it likes (1e+15, or text where they came from a hash):
    they are taken as numbers."""
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"ledger record: {error}") from error
