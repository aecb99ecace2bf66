"""What the scripts answer in JSON, as the values of the interface."""

from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy
from services.ledger.interface import Lease, LedgerStatus, Peer, StepRecord, Taken, TakenGroup


def encode_counts(counts: Mapping[int, int]) -> dict[str, int]:
    """Tokens per version with string keys, as JSON has them."""
    return {str(version): n for version, n in counts.items()}


def decode_counts(counts: Mapping[str, int]) -> dict[int, int]:
    """The inverse of `encode_counts`."""
    return {int(version): n for version, n in counts.items()}


def decode_lease(data: bytes) -> Lease:
    """The answer of `lease`."""
    return msgspec.json.decode(data, type=Lease)


def decode_taken(data: bytes) -> Taken:
    """The answer of `take`."""
    answer = msgspec.json.decode(data)
    return Taken(answer["step"], _groups(answer["groups"]), tuple(answer.get("dropped") or ()))


def decode_step(data: bytes) -> StepRecord:
    """A committed step as `commit` stores it."""
    record = msgspec.json.decode(data)
    return StepRecord(record["step"], record["epoch"], int(record["digest"]), _groups(record["groups"]))


def decode_peer(incarnation: bytes, data: bytes) -> Peer:
    """A pair of the answer of `peers`."""
    record = msgspec.json.decode(data)
    return Peer(record["role"], incarnation.decode(), record["info"])


def encode_peer(peer: Peer) -> bytes:
    """What `register` stores."""
    return msgspec.json.encode({"role": peer.role, "info": dict(peer.info)})


def decode_bound(values: Mapping[str, Any]) -> Bound:
    """A bound as scripts and events write it."""
    return Bound(values["max_staleness"], values["groups_per_step"], Policy(values["policy"]))


def decode_status(data: bytes) -> LedgerStatus:
    """The answer of `status` and `claim`."""
    values = msgspec.json.decode(data)
    engines = {}
    for engine, served in values["engines"].items():
        epoch, _, version = served.rpartition(" ")
        engines[engine] = (epoch, int(version))
    pending = values.get("pending")
    return LedgerStatus(
        version=values["version"],
        epoch=values["epoch"],
        sequence=values["sequence"],
        bound=decode_bound(values["bound"]),
        pending=decode_bound(pending) if pending else None,
        steps=values["steps"],
        issued=values["issued"],
        trained=values["trained"],
        dropped=values["dropped"],
        states={GroupState(state): n for state, n in values["states"].items()},
        dropped_by_reason={reason: int(n) for reason, n in values["dropped_by_reason"].items()},
        wasted_tokens=values["wasted_tokens"],
        halted=values["halted"],
        draining=values["draining"],
        engines=engines,
    )


def _groups(values: list[dict[str, Any]]) -> tuple[TakenGroup, ...]:
    return tuple(
        TakenGroup(v["group"], v["token"], v["deadline"], v["max_staleness"], v["version"], decode_counts(v["counts"])) for v in values
    )
