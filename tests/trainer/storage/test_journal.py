"""Tests the encoding of journal entries: they come back as they were, or not at all."""

import pytest
import xxhash

from trainer.storage.journal import JournalEntry, decode_entry, encode_entry

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
