"""Tests the checksum that binds a stored message to what was received."""

import pytest
import xxhash
from msgspec.structs import replace

from trainer.storage.stored import JournalEntry, MissingRecords, StoredMessage, decode_entry, encode_entry

RECORD = StoredMessage.received(7, "a", b"payload")
CALL = StoredMessage.received(7, "a", b"payload", 1, 2)


@pytest.mark.parametrize("message", [RECORD, CALL], ids=["record", "call"])
def test_a_message_is_whole_as_it_was_received(message: StoredMessage) -> None:
    assert message.is_whole


@pytest.mark.parametrize(
    "change",
    [{"group": 8}, {"token": "b"}, {"payload": b"paylnad"}, {"sample": 0}, {"number": 3}, {"checksum": 0}],
    ids=str,
)
def test_no_field_can_change_unnoticed(change: dict[str, object]) -> None:
    assert not replace(CALL, **change).is_whole


def test_a_call_is_no_record() -> None:
    assert not replace(CALL, sample=-1, number=-1).is_whole


def test_all_missing_records_are_known_and_a_few_are_named() -> None:
    missing = MissingRecords({(group, "a"): f"group {group}: is away" for group in range(7)})
    assert list(missing.causes) == [(group, "a") for group in range(7)]
    assert str(missing) == "; ".join([*(f"group {group}: is away" for group in range(5)), "and 2 more"])


ENTRY = JournalEntry("commit", "e1", 4, (7, 9), 21, details={"digest": "18446744073709551615", "groups": {}})


def test_an_entry_comes_back_at_its_position() -> None:
    found = decode_entry(3, *encode_entry(ENTRY))
    assert found is not None
    assert (found.position, found.groups, found.details) == (3, (7, 9), ENTRY.details)


def test_any_changed_bit_is_found() -> None:
    payload, checksum = encode_entry(ENTRY)
    for place in range(len(payload)):
        for bit in range(8):
            damaged = payload[:place] + bytes([payload[place] ^ 1 << bit]) + payload[place + 1 :]
            assert decode_entry(3, damaged, checksum) is None


@pytest.mark.parametrize("payload", [b"", b"{}", b"\xff", b"[" * 5000])
def test_bytes_that_are_no_entry_count_as_damaged(payload: bytes) -> None:
    assert decode_entry(3, payload, xxhash.xxh3_64_digest(payload)) is None
    assert decode_entry(3, None, b"") is None
