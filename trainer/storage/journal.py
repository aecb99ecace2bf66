"""Encodes entries of the spool's journal, with a checksum that every reader compares."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import xxhash


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A few accepts, or one commit."""

    event: str
    """accept or commit."""
    epoch: str
    """The trainer's."""
    step: int
    """The step that was committed; -1 for an accept."""
    groups: tuple[int, ...]
    """The groups that were accepted, or trained."""
    ledger_sequence: int
    """Number of the last ledger event that was seen with it."""
    position: int = 0
    """Position in the journal, from 1; set by the spool."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON values from which the event can be replayed to a ledger that lost it, see
    `services/ledger_recovery/restore.py`."""


def encode_entry(entry: JournalEntry) -> tuple[bytes, bytes]:
    """Return an entry without its position, and the checksum of that."""
    payload = msgspec.json.encode(replace(entry, position=0))
    return payload, xxhash.xxh3_64_digest(payload)


def decode_entry(position: int, payload: object, checksum: object) -> JournalEntry | None:
    """Return the entry at a position, None if it does not match its checksum or is no entry."""
    if not isinstance(payload, bytes) or xxhash.xxh3_64_digest(payload) != checksum:
        return None
    try:
        return replace(msgspec.json.decode(payload, type=JournalEntry), position=position)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
