"""Tests the spool: order, durability after kill -9, concurrent processes, and what it refuses."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from protocol.errors import SettingsError, SpoolError, TetherError
from trainer.storage.spool import Spool
from trainer.storage.stored import JournalEntry, MissingRecords

ROOT = Path(__file__).resolve().parents[3]

WRITER = """
import sys
from pathlib import Path
from trainer.storage.stored import JournalEntry
from trainer.storage.spool import Spool
from trainer.storage.stored import MissingRecords
spool = Spool(Path(sys.argv[1]))
for group in range(1000000):
    spool.put_many([(group, "a", bytes([group % 256]) * 5000), (group, "b", b"late")])
    spool.append([JournalEntry("accept", "e", -1, (group,), group)])
    print(group, flush=True)
"""


def writer(path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )


def records(spool: Spool) -> int:
    """Count its records."""
    assert spool._connection is not None
    return int(spool._connection.execute("SELECT COUNT(*) FROM records").fetchone()[0])


def test_records_are_returned_in_the_order_asked_for(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"one"), (2, "b", b"two")])
    spool.put_many([(3, "c", b"")])
    assert spool.get_many([(3, "c"), (1, "a")]) == [b"", b"one"]
    assert spool.get_many([(2, "b")]) == [b"two"]


def test_a_record_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"first")])
    assert spool.put_many([(1, "a", b"second"), (1, "b", b"other lease")]) == {(1, "b")}
    assert spool.get_many([(1, "a"), (1, "b")]) == [b"first", b"other lease"]


def test_records_are_found_by_group_whatever_their_lease(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"one"), (2, "b", b"two"), (3, "c", b"three")])
    assert spool.find([3, 9, 1, 3]) == [b"one", b"three"]
    assert spool.find([]) == []


def test_the_newest_record_is_found_whatever_the_clock_said(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    for token, payload in (("a", b"older"), ("b", b"newer")):
        spool.put_many([(1, token, payload)])
    with spool.transaction("write") as connection:
        connection.execute("UPDATE records SET accepted_ms = 0 WHERE token = 'b'")
    assert spool.find([1]) == [b"newer"]


def test_a_missing_record_names_its_group(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"x")])
    with pytest.raises(LookupError, match="group 2: the spool has no record of it under lease a") as caught:
        spool.get_many([(1, "a"), (2, "a")])
    assert isinstance(caught.value, MissingRecords)
    assert list(caught.value.causes) == [(2, "a")]


def test_forget_removes_covered_groups_only(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"x"), (1, "b", b"x"), (2, "a", b"x"), (3, "a", b"x")])
    assert spool.forget([1, 3, 9]) == 3
    assert records(spool) == 1
    assert spool.forget([]) == 0
    assert spool.get_many([(2, "a")]) == [b"x"]


def test_the_journal_keeps_order_and_positions(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    assert (spool.position, spool.ledger_sequence, spool.journal()) == (0, 0, [])
    assert (
        spool.append([JournalEntry("accept", "e1", -1, (4,), 11), JournalEntry("accept", "e1", -1, (5,), 13)])
        == 2
    )
    spool.append([JournalEntry("commit", "e1", 0, (4, 5), 14)])
    reopened = Spool(tmp_path / "spool.sqlite")
    assert (reopened.position, reopened.ledger_sequence) == (3, 14)
    assert reopened.journal()[1:] == [
        JournalEntry("accept", "e1", -1, (5,), 13, position=2),
        JournalEntry("commit", "e1", 0, (4, 5), 14, position=3),
    ]


def test_the_journal_forgets_only_what_the_archive_has_and_keeps_the_newest_of_it(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.append(
        [JournalEntry("accept", "e", -1, (group,), seen) for group, seen in enumerate((3, 8, 5, 9, 12, 14))]
    )
    for journal_from, archived, left in (
        (6, 0, [3, 8, 5, 9, 12, 14]), (3, 8, [8, 5, 9, 12, 14]), (6, 7, [8, 5, 9, 12, 14]),
        (6, 11, [9, 12, 14]), (99, 99, [14]),
    ):  # fmt: skip
        spool.forget([], journal_from, archived)
        assert [entry.ledger_sequence for entry in spool.journal()] == left


def test_record_survives_kill_9_after_put_returned(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    process = writer(path)
    assert process.stdout is not None
    last = max(int(process.stdout.readline()) for _ in range(5))
    process.send_signal(signal.SIGKILL)
    last = max([last, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
    process.wait()
    process.stdout.close()
    spool = Spool(path)
    for group in range(last + 1):
        assert spool.get_many([(group, "a"), (group, "b")]) == [bytes([group % 256]) * 5000, b"late"]
    assert spool.position >= last + 1
    assert records(spool) % 2 == 0  # a batch is there whole or not at all


def test_a_reader_sees_complete_batches_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    process = writer(path)
    assert process.stdout is not None
    process.stdout.readline()
    reader = Spool(path, read_only=True)
    for _ in range(20):
        group = int(process.stdout.readline())
        assert reader.get_many([(group, "a"), (group, "b")])[1] == b"late"
        assert records(reader) % 2 == 0
    process.kill()
    process.wait()
    process.stdout.close()
    reader.close()


def test_two_processes_may_write(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    process = writer(path)
    assert process.stdout is not None
    process.stdout.readline()
    spool = Spool(path)
    for group in range(20):
        spool.put_many([(group, "trainer", b"y")])
    process.kill()
    process.wait()
    process.stdout.close()
    assert spool.get_many([(g, "trainer") for g in range(20)]) == [b"y"] * 20


def test_threads_may_share_a_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for group in range(20):
                spool.put_many([(group, f"t{thread}", b"z")])
                assert spool.get_many([(group, f"t{thread}")]) == [b"z"]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert records(spool) == 80


def test_a_full_disk_stores_nothing_and_says_so(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"x")])
    assert spool._connection is not None
    spool._connection.execute("PRAGMA max_page_count = 12")
    with pytest.raises(SpoolError, match="cannot write: database or disk is full") as caught:
        spool.put_many([(2, "a", b"small"), (3, "a", b"x" * 1_000_000)])
    assert isinstance(caught.value, TetherError)
    assert isinstance(caught.value, OSError)
    assert records(spool) == 1
    spool._connection.execute("PRAGMA max_page_count = 100000")
    spool.put_many([(2, "a", b"small")])
    assert records(spool) == 2


def test_a_read_only_spool_refuses_writes(tmp_path: Path) -> None:
    Spool(tmp_path / "spool.sqlite").put_many([(1, "a", b"x")])
    reader = Spool(tmp_path / "spool.sqlite", read_only=True)
    with pytest.raises(SpoolError, match="readonly"):
        reader.put_many([(2, "a", b"x")])
    assert records(reader) == 1


def test_a_spool_is_read_where_no_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user's run that is over, or of one on a file system that is mounted read-only."""
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        spool.put_many([(1, "a", b"x")])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with closing(Spool(tmp_path / "spool.sqlite", read_only=True)) as reader:
        assert records(reader) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["spool.sqlite"]


def test_file_that_is_not_a_spool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match=r"absent\.sqlite: cannot open"):
        Spool(tmp_path / "absent.sqlite", read_only=True)
    assert not (tmp_path / "absent.sqlite").exists()
    (tmp_path / "text").write_text("no database, but long enough to have a header of a hundred bytes" * 4)
    with pytest.raises(SpoolError, match="not a database"):
        Spool(tmp_path / "text")
    with pytest.raises(SpoolError, match="text"):
        Spool(tmp_path / "text" / "spool.sqlite")


def test_a_closed_spool_refuses_and_closing_twice_is_harmless(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.close()
    spool.close()
    with pytest.raises(SpoolError, match="is closed"):
        spool.put_many([(1, "a", b"x")])


def test_writes_are_synchronous_in_wal_mode(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    assert spool._connection is not None
    assert spool._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    with sqlite3.connect(tmp_path / "spool.sqlite") as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def edit(path: Path, statement: str, *values: object) -> None:
    """Change a spool as a fault of the disk would."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement, values)
        connection.commit()


@pytest.mark.parametrize("damage", [b"on\x00", b"", "text", 5, None], ids=repr)
def test_all_damaged_and_missing_records_are_named_at_once(tmp_path: Path, damage: object) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"one"), (2, "a", b"two"), (3, "a", b"three")])
    column = "sum" if damage is None else "payload"
    edit(spool.path, f"UPDATE records SET {column} = ? WHERE grp = 1", b"" if damage is None else damage)
    with pytest.raises(MissingRecords) as caught:
        spool.get_many([(1, "a"), (2, "a"), (3, "b")])
    assert caught.value.causes == {
        (1, "a"): "group 1: its record under lease a does not match its checksum",
        (3, "b"): "group 3: the spool has no record of it under lease b",
    }
    assert spool.find([1, 2]) == [b"two"]
    assert [(item.group, item.what) for item in spool.damaged()] == [
        (1, "the record of group 1 under lease a")
    ]


def test_a_record_of_another_group_or_lease_is_damaged(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"one"), (2, "a", b"two")])
    edit(spool.path, "UPDATE records SET token = 'b' WHERE grp = 1")
    edit(spool.path, "UPDATE records SET grp = 3 WHERE grp = 2")
    for key in ((1, "b"), (3, "a")):
        with pytest.raises(MissingRecords, match="does not match its checksum"):
            spool.get_many([key])


def test_a_damaged_entry_of_the_journal_is_known_by_its_position(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.append([JournalEntry("accept", "e1", -1, (group,), 10 + group) for group in range(3)])
    edit(spool.path, "UPDATE journal SET payload = CAST(replace(payload, '12', '92') AS BLOB) WHERE seq = 3")
    assert [entry and entry.position for entry in spool.journal()] == [1, 2, None]
    assert spool.ledger_sequence == 11
    assert [item.what for item in spool.damaged()] == ["entry 3 of the journal"]


def test_every_process_reads_the_same_id_of_a_spool(tmp_path: Path) -> None:
    spool, again = Spool(tmp_path / "spool.sqlite"), Spool(tmp_path / "spool.sqlite", create=False)
    other = Spool(tmp_path / "other.sqlite")
    assert spool.id == again.id != other.id


def test_a_spool_of_another_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    edit(path, "CREATE TABLE records (grp INTEGER, token TEXT, payload BLOB, accepted_ms INTEGER)")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(SpoolError, match=r"another version of tether \(schema 0, this one reads 2\)"):
            Spool(path, read_only=read_only)
    assert path.read_bytes() == before


def test_an_empty_spool_is_called_empty_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    path.touch()
    with pytest.raises(SpoolError, match=r"spool\.sqlite is empty: restore the file"):
        Spool(path, read_only=True)
    assert path.read_bytes() == b""
    assert Spool(path).position == 0, "who may make one fills it"


def test_a_spool_is_made_only_by_who_may(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="cannot open"):
        Spool(tmp_path / "spool.sqlite", create=False)
    assert list(tmp_path.iterdir()) == []


def replace_by_another(path: Path) -> None:
    for part in path.parent.glob(f"{path.name}*"):
        part.unlink()
    Spool(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "replaced": replace_by_another,
    "log deleted": lambda path: path.with_name(f"{path.name}-wal").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_acknowledged_into_a_file_that_is_not_at_its_path(tmp_path: Path, change: str) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(1, "a", b"x")])
    spool.check_not_replaced()
    CHANGES[change](spool.path)
    for use in (
        spool.check_not_replaced,
        lambda: spool.put_many([(2, "a", b"x")]),
        lambda: spool.append([JournalEntry("accept", "e1", -1, (2,), 3)]),
    ):
        with pytest.raises(SettingsError, match=f"the spool {spool.path} was deleted or replaced"):
            use()


def test_a_place_stays_the_same_while_others_open_and_close(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    for read_only in (True, False):
        other = Spool(spool.path, read_only=read_only)
        other.find([1])
        other.close()
        spool.put_many([(1, "a", bytes(5_000_000))])
        spool.forget([1])
        spool.check_not_replaced()
