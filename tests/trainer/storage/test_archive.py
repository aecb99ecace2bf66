"""Tests the archive: records are returned as stored, damage is named, the oldest are removed first."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.errors import SpoolError
from trainer.storage.archive import Archive
from trainer.storage.stored import MissingRecords, StoredMessage

KEYS = [(7, "a"), (3, "b")]
record = StoredMessage.received


def filled(directory: Path, limit_mb: int = 1) -> Archive:
    archive = Archive(directory, limit_mb)
    archive.put(2, [record(3, "b", b"three"), record(7, "a", b"seven")])
    return archive


def test_records_come_out_in_the_order_asked_for(tmp_path: Path) -> None:
    filled(tmp_path)
    assert Archive(tmp_path).get(2, KEYS) == [b"seven", b"three"]
    assert Archive(tmp_path).steps() == [2]


def test_a_step_that_is_put_again_replaces_the_first(tmp_path: Path) -> None:
    archive = filled(tmp_path)
    archive.put(2, [record(9, "c", b"nine")])
    assert archive.get(2, [(9, "c")]) == [b"nine"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002.msgpack"]


@pytest.mark.parametrize(("step", "key"), [(1, (7, "a")), (2, (8, "a")), (2, (7, "b"))])
def test_missing_step_is_named(tmp_path: Path, step: int, key: tuple[int, str]) -> None:
    archive = filled(tmp_path)
    with pytest.raises(MissingRecords) as missing:
        archive.get(step, [key])
    assert list(missing.value.causes) == [key]


@pytest.mark.parametrize("position", [0, 20, -1])
def test_a_damaged_file_is_named(tmp_path: Path, position: int) -> None:
    archive = filled(tmp_path)
    path = tmp_path / "step_00000002.msgpack"
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises((SpoolError, MissingRecords), match=r"step_00000002\.msgpack is damaged|no record"):
        archive.get(2, KEYS)


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 1)
    for step in range(5):
        archive.put(step, [record(step, "t", bytes(400_000))])
        archive.make_room()
    assert archive.steps() == [3, 4]
    archive.put(5, [record(5, "t", bytes(3 << 20))])
    archive.make_room()
    assert archive.steps() == [5]


def test_nothing_is_kept_where_there_is_no_room_at_all(tmp_path: Path) -> None:
    archive = filled(tmp_path / "none", 0)
    assert archive.steps() == []
    assert not (tmp_path / "none").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SpoolError, match="archive"):
        filled(tmp_path / "file" / "x")


def test_the_archive_keeps_the_checksum_of_what_was_received(tmp_path: Path) -> None:
    archive, received = Archive(tmp_path, 1), record(7, "a", b"seven")
    archive.put(2, [received], [StoredMessage.received(7, "a", b"call", 0, 3)])
    assert archive.read(2).records == (received,)
    archive.put(2, [received], [replace(StoredMessage.received(7, "a", b"call", 0, 3), payload=b"cald")])
    with pytest.raises(SpoolError, match="call 3 of sample 0 of group 7 does not match its checksum"):
        archive.read(2)
    archive.put(2, [replace(received, payload=b"sevem")])
    with pytest.raises(SpoolError, match="the record of group 7 does not match its checksum"):
        archive.get(2, [(7, "a")])


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 1)
    calls = [record(7, "a", bytes(200), sample, number) for sample in range(2) for number in range(2)]
    archive.put(2, [record(3, "b", b"three"), record(7, "a", bytes(300))], calls)
    path = tmp_path / "step_00000002.msgpack"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for change in (1 + place % 255, 0x1C):  # the latter makes a signed number of an unsigned one
            changed = bytearray(whole)
            changed[place] ^= change
            path.write_bytes(changed)
            with pytest.raises(SpoolError, match=r"step_00000002\.msgpack is damaged"):
                archive.read(2)
