"""Tests the checksum that binds a stored message to what was received."""

import pytest
from msgspec.structs import replace

from trainer.storage.stored import MissingRecords, StoredMessage

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
