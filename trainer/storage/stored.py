"""Encodes what the spool stores, each entry with a checksum that every reader compares.

The ingest computes it over the payload as it arrived. The spool and the archive keep it with the payload, and
every reader compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec
import xxhash

MOST_NAMED = 5
"""Groups that the text of an error names."""


class StoredMessage(msgspec.Struct, frozen=True):
    """A message as the ingest received it: the record of a group, or a call of one of its samples."""

    group: int
    token: str
    """The lease under which it came."""
    checksum: int
    """xxh3-64 of group, token, for a call sample and number, and payload."""
    payload: bytes
    """The encoded `ScoredRollout` or `Call`."""
    sample: int = -1
    """The sample of a call; -1 for a record."""
    number: int = -1
    """The number of a call; -1 for a record."""

    @classmethod
    def received(cls, group: int, token: str, payload: bytes, sample: int = -1, number: int = -1) -> Self:
        """Return a message that has just arrived, with its checksum."""
        return cls(group, token, _checksum(group, token, payload, sample, number), payload, sample, number)

    @property
    def is_whole(self) -> bool:
        """Whether it is what was received."""
        found = _checksum(self.group, self.token, self.payload, self.sample, self.number)
        return found == self.checksum


class MissingRecords(LookupError):
    """Records that are not there as they were received; their groups are `lost` and generated again."""

    def __init__(self, causes: Mapping[tuple[int, str], str]) -> None:
        """Store the cause of each, by group and lease token; a cause names its group."""
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
