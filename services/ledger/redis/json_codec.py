"""Converts between the JSON of the Lua scripts and the values of the interface.

Invalid JSON raises ProtocolError.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from protocol.errors import ProtocolError
from services.ledger.interface import LedgerStatus, Peer, Snapshot, TakenGroup

T = TypeVar("T")
_SNAPSHOT_FIELDS = (
    "epoch",
    "epochs",
    "found",
    "after",
    "sequence",
    "version",
    "checkpoint",
    "issued",
    "trained",
    "dropped",
    "wasted_tokens",
    "reasons",
    "halted",
    "wasted_by_reason",
)
"""Fields of a `Snapshot` that have the same name and value in JSON."""


def encode_counts(counts: Mapping[int, int]) -> dict[str, int]:
    """Return token counts by version with string keys, for JSON."""
    return {str(version): n for version, n in counts.items()}


def decode(data: bytes, kind: type[T]) -> T:
    """Decode `data` as `kind`.

    Numbers may have the form 1e+15, or be text if they come from a hash, because Lua writes them so.
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"ledger record: {error}") from error


def decode_peer(incarnation: bytes, data: bytes) -> Peer:
    """Decode one pair in the answer of `peers`."""
    fields = decode(data, dict[str, Any])
    return _convert(fields | {"incarnation": incarnation.decode(errors="replace")}, Peer)


def encode_peer(peer: Peer) -> bytes:
    """Encode a process for `register`."""
    return msgspec.json.encode({"role": peer.role, "info": dict(peer.info)})


def encode_endpoints(peer: Peer) -> bytes:
    """Encode the endpoints of a process by topic, for `register`; empty without endpoints."""
    endpoints = peer.info.get("endpoints")
    return msgspec.json.encode(endpoints, order="sorted") if endpoints else b""


def decode_endpoints(data: Mapping[bytes, bytes]) -> dict[str, dict[str, str]]:
    """Decode the hash `endpoints` to topic -> incarnation -> endpoint.

    The field with the empty name counts changes and is skipped.
    """
    topics: dict[str, dict[str, str]] = {}
    for incarnation, served in data.items():
        if incarnation:
            for topic, endpoint in decode(served, dict[str, str]).items():
                topics.setdefault(topic, {})[incarnation.decode(errors="replace")] = endpoint
    return topics


def decode_status(data: bytes) -> LedgerStatus:
    """Decode the answer of `status` or `claim`."""
    fields = {"pending": None} | decode(data, dict[str, Any])
    engines = _convert(fields.get("engines"), dict[str, str])
    fields["engines"] = {engine: _served(text) for engine, text in engines.items()}
    return _convert(fields, LedgerStatus)


def encode_snapshot(snapshot: Snapshot) -> list[bytes | int]:
    """Encode the arguments of `rebuild`: JSON, then each step followed by its report."""
    values = {
        **{name: getattr(snapshot, name) for name in _SNAPSHOT_FIELDS},
        "told": snapshot.journal_events,
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


def _encode_group(group: TakenGroup) -> dict[str, Any]:
    return {**dataclasses.asdict(group), "counts": encode_counts(group.counts)}


def _served(text: str) -> tuple[str, int]:
    epoch, _, version = text.rpartition(" ")
    try:
        return epoch, int(version)
    except ValueError:
        raise ProtocolError(
            f"ledger record: an engine serves {text[:80]!r}, not an epoch and a version"
        ) from None


def _convert(fields: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind, strict=False)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"ledger record: {error}") from error
