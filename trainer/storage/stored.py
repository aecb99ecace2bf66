"""Encodes the entries of the spool, each with a checksum that every reader verifies.

The ingest computes the checksum over the payload on arrival. Spool and archive store the checksum with the
payload.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec
import xxhash

MOST_NAMED = 5
"""Maximum number of groups in an error message."""


class StoredMessage(msgspec.Struct, frozen=True):
    """A message as the ingest received it: the record of a group, or a call of one of its samples."""

    group: int
    token: str
    """Lease token of the message."""
    checksum: int
    """xxh3-64 of group, token, sample and number (for a call), and payload."""
    payload: bytes
    """Encoded `ScoredRollout` or `Call`."""
    sample: int = -1
    """Sample of a call; -1 for a record."""
    number: int = -1
    """Number of a call; -1 for a record."""

    @classmethod
    def received(cls, group: int, token: str, payload: bytes, sample: int = -1, number: int = -1) -> Self:
        """Return a message that has just arrived, with its checksum."""
        return cls(group, token, _checksum(group, token, payload, sample, number), payload, sample, number)

    @property
    def is_whole(self) -> bool:
        """Whether the message matches its checksum."""
        found = _checksum(self.group, self.token, self.payload, self.sample, self.number)
        return found == self.checksum


class MissingRecords(LookupError):
    """Records are missing or damaged; their groups are `lost` and generated again."""

    def __init__(self, causes: Mapping[tuple[int, str], str]) -> None:
        """Store the causes: (group, lease token) -> cause, which names the group."""
        named = list(causes.values())[:MOST_NAMED]
        more = [f"and {len(causes) - MOST_NAMED} more"] if len(causes) > MOST_NAMED else []
        super().__init__("; ".join(named + more))
        self.causes = dict(causes)


def damaged_record(group: int, token: str) -> str:
    """Return the message about a record that does not match its checksum."""
    return f"group {group}: its record under lease {token} does not match its checksum"


def _checksum(group: int, token: str, payload: bytes, sample: int, number: int) -> int:
    place = b"" if (sample, number) == (-1, -1) else b"%d %d " % (sample, number)
    found = xxhash.xxh3_64(b"%d %b " % (group, token.encode()) + place)
    found.update(payload)
    return found.intdigest()


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Several accepts, or one commit."""

    event: str
    """accept or commit."""
    epoch: str
    """Epoch of the trainer."""
    step: int
    """Committed step; -1 for an accept."""
    groups: tuple[int, ...]
    """Groups that were accepted or trained."""
    ledger_sequence: int
    """Sequence number of the last ledger event seen with the entry."""
    position: int = 0
    """Position in the journal, from 1; set by the spool."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for replaying the event to a ledger that lost it, see
    `services/ledger_recovery/restore.py`."""


def encode_entry(entry: JournalEntry) -> tuple[bytes, bytes]:
    """Return the encoded entry, without its position, and the checksum of the encoding."""
    payload = msgspec.json.encode(replace(entry, position=0))
    return payload, xxhash.xxh3_64_digest(payload)


def decode_entry(position: int, payload: object, checksum: object) -> JournalEntry | None:
    """Return the entry at a position; None if it is malformed or does not match its checksum."""
    if not isinstance(payload, bytes) or xxhash.xxh3_64_digest(payload) != checksum:
        return None
    try:
        return replace(msgspec.json.decode(payload, type=JournalEntry), position=position)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
