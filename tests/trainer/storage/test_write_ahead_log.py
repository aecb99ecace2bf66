"""The write-ahead log of a killed spool: SQLite drops what follows a damaged byte, the check names it."""

import random
import shutil
from pathlib import Path

import pytest

from trainer.storage.spool import Spool
from trainer.storage.write_ahead_log import FRAME_BYTES, HEADER_BYTES, damage_in_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of a spool that nobody closed."""
    spool = Spool(tmp_path / "spool.sqlite")
    for group in range(6):
        spool.put_many([(group, "lease", random.Random(group).randbytes(3000))])
    shutil.copy(tmp_path / "spool.sqlite-wal", tmp_path / "copy-wal")
    spool.close()
    return tmp_path / "copy-wal"


def page_bytes(log: Path) -> int:
    return int.from_bytes(log.read_bytes()[8:12])


def test_a_log_that_is_whole_empty_or_missing_is_not_damaged(log: Path) -> None:
    assert damage_in_log(log) is None
    assert damage_in_log(log.with_name("none")) is None
    log.write_bytes(b"")
    assert damage_in_log(log) is None


def test_any_changed_byte_is_found(log: Path) -> None:
    whole, draw = log.read_bytes(), random.Random(7)
    last = len(whole) - FRAME_BYTES - page_bytes(log)  # its salts tell it from an older log's frame
    for place in [*range(HEADER_BYTES + FRAME_BYTES), *(draw.randrange(last) for _ in range(60))]:
        changed = bytearray(whole)
        changed[place] ^= draw.randrange(1, 256)
        log.write_bytes(changed)
        assert damage_in_log(log) is not None, place


def test_frames_of_an_older_log_are_no_damage(tmp_path: Path) -> None:
    spool, log = Spool(tmp_path / "spool.sqlite"), tmp_path / "spool.sqlite-wal"
    for group in range(6):
        spool.put_many([(group, "lease", bytes(3000))])
    with spool.transaction("read", "BEGIN"):
        pass
    assert spool._connection is not None
    spool._connection.execute("PRAGMA wal_checkpoint(RESTART)")
    size = log.stat().st_size
    spool.put_many([(7, "lease", b"short")])
    assert log.stat().st_size == size
    assert damage_in_log(log) is None
    spool.close()
