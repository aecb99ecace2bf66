"""Stores accepted groups on disk, from their acknowledgement until a durable checkpoint covers their step.

One SQLite file (WAL, synchronous=FULL), written by the ingest and read by the trainer at the same time:

    records(grp, token, payload, sum, accepted_ms)
        payload: encoded `ScoredRollout` as received, by group and lease token
    journal(seq, ledger_seq, payload, sum)
        accepts and commits in order of arrival; `stored.py` encodes them
    calls(grp, sample, number, token, payload, sum, stored_ms), call_leases(grp, token)
        `Call`s as they were received, and the lease of each group that may add some; `call_store.py` reads
        and writes them
    meta(id)
        a random name of this spool

`sum` is a checksum (`stored.py`) that every read verifies; a damaged row counts as missing. Times (Unix, ms)
are for people; the code does not use them. Writes are on disk when a method returns, in the file that is then
at the path. The file must be on a local disk, because WAL needs shared memory between its users.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import SettingsError, SpoolError, error_text
from trainer.storage.stored import (
    JournalEntry,
    MissingRecords,
    StoredMessage,
    damaged_record,
    decode_entry,
    encode_entry,
)

BUSY_S = 30.0
"""Timeout for another process's write, seconds."""
SCHEMA = 2
"""Version of these tables, in SQLite's user_version."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS records (
    grp INTEGER NOT NULL, token TEXT NOT NULL, payload BLOB NOT NULL, sum BLOB NOT NULL,
    accepted_ms INTEGER NOT NULL, UNIQUE (grp, token)
);
CREATE TABLE IF NOT EXISTS journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, ledger_seq INTEGER NOT NULL, payload BLOB NOT NULL,
    sum BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS calls (
    grp INTEGER NOT NULL, sample INTEGER NOT NULL, number INTEGER NOT NULL, token TEXT NOT NULL,
    payload BLOB NOT NULL, sum BLOB NOT NULL, stored_ms INTEGER NOT NULL, PRIMARY KEY (grp, sample, number)
);
CREATE TABLE IF NOT EXISTS call_leases (grp INTEGER PRIMARY KEY, token TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS meta (id TEXT NOT NULL);
INSERT INTO meta SELECT lower(hex(randomblob(16))) WHERE NOT EXISTS (SELECT 1 FROM meta);
PRAGMA user_version = {SCHEMA};
COMMIT;
"""
_INSERT = "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)"
_PRUNE = """
DELETE FROM journal WHERE seq < ? AND ledger_seq < (
    SELECT MAX(ledger_seq) FROM journal WHERE seq < ? AND ledger_seq <= ?
)
"""
# CAST: a damaged column may have a different type
_RECORD = "SELECT CAST(payload AS BLOB), CAST(sum AS BLOB) FROM records WHERE grp = ? AND token = ?"
_TOKENS = "SELECT CAST(token AS BLOB) FROM records WHERE grp = ? ORDER BY rowid DESC"
_JOURNAL = "SELECT seq, ledger_seq, CAST(payload AS BLOB), CAST(sum AS BLOB) FROM journal ORDER BY seq"


@dataclass(frozen=True, slots=True)
class DamagedItem:
    """A damaged row of the spool."""

    what: str
    """Description of the row, such as "the record of group 7 under lease 3f2a"."""
    group: int = -1
    """Group of a record or a call; -1 for an entry of the journal."""


class Spool:
    """Spool of a run, safe for several threads and processes.

    Every method blocks; call it off the event loop.
    """

    def __init__(self, path: Path, *, read_only: bool = False, create: bool = True) -> None:
        """Open the spool, and create the file unless `read_only` is set or `create` is False.

        Raises:
            SpoolError: the file cannot be opened, is not a spool, or has a different schema.
        """
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        create = create and not read_only
        if create:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SpoolError(f"spool {path}: {error_text(error)}") from error
        with self._explained("open"):
            self._connection = _connect(path, read_only=read_only, create=create)
            self.id = str(self._connection.execute("SELECT id FROM meta").fetchone()[0])
            """Random name of the spool, equal in every process that opens it."""
            self._file_ids = self._current_file_ids()

    def put_many(self, records: Iterable[tuple[int, str, bytes]]) -> set[tuple[int, str]]:
        """Store records (group, token, payload) with one fsync, either all or none.

        Returns (group, token) of the new records; an existing record is not replaced. Raises SpoolError if
        the disk is full or the file cannot be written; no record was stored then.
        """
        now_ms = time.time_ns() // 1_000_000
        received = (StoredMessage.received(*record) for record in records)
        rows = [(r.group, r.token, r.payload, r.checksum.to_bytes(8), now_ms) for r in received]
        with self.transaction("write") as connection:
            return {(row[0], row[1]) for row in rows if connection.execute(_INSERT, row).rowcount}

    def remove(self, records: Iterable[tuple[int, str]]) -> None:
        """Delete records (group, token) that the ledger refused. Raises SpoolError."""
        with self.transaction("write") as connection:
            connection.executemany("DELETE FROM records WHERE grp = ? AND token = ?", records)

    def get_many(self, keys: Sequence[tuple[int, str]]) -> list[bytes]:
        """Return the payloads of `stored`; raises its errors."""
        return [record.payload for record in self.stored(keys)]

    def stored(self, keys: Sequence[tuple[int, str]]) -> list[StoredMessage]:
        """Return records in the order of `keys` (group, token), read from one snapshot.

        Raises:
            MissingRecords: (a LookupError) records are missing or damaged; the message names their groups.
            SpoolError: the file cannot be read.
        """
        messages, causes = [], {}
        with self.transaction("read", "BEGIN") as connection:
            for key in keys:
                record = _read_record(connection, *key)
                if isinstance(record, str):
                    causes[key] = record
                else:
                    messages.append(record)
        if causes:
            raise MissingRecords(causes)
        return messages

    def find(self, groups: Iterable[int]) -> list[bytes]:
        """Return the newest intact payload of each group that has one, under any lease. Raises SpoolError."""
        messages = []
        with self.transaction("read", "BEGIN") as connection:
            for group in sorted(set(groups)):
                tokens = [_text(row[0]) for row in connection.execute(_TOKENS, (group,)).fetchall()]
                records = (_read_record(connection, group, token) for token in tokens)
                messages += [next((r.payload for r in records if not isinstance(r, str)), None)]
        return [payload for payload in messages if payload is not None]

    def damaged(self) -> Iterator[DamagedItem]:
        """Read the whole spool, and yield each damaged row. Raises SpoolError."""
        with self.transaction("read", "BEGIN") as connection:
            for (found,) in connection.execute("PRAGMA integrity_check"):
                if found != "ok":
                    yield DamagedItem(f"its pages: {found}")
            keys = "SELECT grp, CAST(token AS BLOB) FROM records ORDER BY grp"
            for group, token in connection.execute(keys):
                if isinstance(_read_record(connection, group, _text(token)), str):
                    yield DamagedItem(f"the record of group {group} under lease {_text(token)}", group)
            for group, sample, number, call in read_calls(connection):
                if call is None:
                    yield DamagedItem(f"call {number} of sample {sample} of group {group}", group)
            for position, entry in _entries(connection):
                if entry is None:
                    yield DamagedItem(f"entry {position} of the journal")

    def forget(self, groups: Iterable[int], journal_from: int = 0, archived: int = 0) -> int:
        """Delete dropped groups and groups covered by a durable checkpoint; return the number of records.

        Records under all lease tokens are deleted. The newest journal entry that could be deleted is kept: if
        the archive of the event log later lacks it, the entry reveals a gap between archive and journal.

        Args:
            journal_from: position before which journal entries are deleted, as far as `archived` allows.
            archived: sequence number of the last ledger event in the archive of the event log.
        """
        rows = [(group,) for group in sorted(set(groups))]
        with self.transaction("write") as connection:
            connection.execute(_PRUNE, (journal_from, journal_from, archived))
            connection.executemany("DELETE FROM calls WHERE grp = ?", rows)
            connection.executemany("DELETE FROM call_leases WHERE grp = ?", rows)
            return connection.executemany("DELETE FROM records WHERE grp = ?", rows).rowcount if rows else 0

    def append(self, entries: Iterable[JournalEntry]) -> int:
        """Append entries to the journal with one fsync; return the new `position`."""
        rows = [(entry.ledger_sequence, *encode_entry(entry)) for entry in entries]
        with self.transaction("write") as connection:
            connection.executemany("INSERT INTO journal (ledger_seq, payload, sum) VALUES (?, ?, ?)", rows)
            return _position(connection)

    def journal(self) -> list[JournalEntry | None]:
        """Return all entries of the journal in order; None in place of a damaged entry."""
        with self.transaction("read", "BEGIN") as connection:
            return [entry for _, entry in _entries(connection)]

    @property
    def position(self) -> int:
        """Position of the last journal entry, which checkpoints store; 0 if the journal is empty."""
        with self.transaction("read", "BEGIN") as connection:
            return _position(connection)

    @property
    def ledger_sequence(self) -> int:
        """Highest ledger sequence in the journal's intact entries; 0 if there is none.

        A ledger with a lower sequence has lost writes.
        """
        return max((entry.ledger_sequence for entry in self.journal() if entry), default=0)

    def check_not_replaced(self) -> None:
        """Check that the file at the path, and its write-ahead log, are still the open files.

        Raises:
            SettingsError: a file was deleted or replaced, so this process's writes would be lost.
        """
        if self._current_file_ids() != self._file_ids:
            raise SettingsError(
                f"the spool {self.path} was deleted or replaced while the run was using it: nothing was "
                "acknowledged since; leave the run directory as it is and start the run again, which "
                "generates the groups that the spool does not hold once more"
            )

    def copy_to(self, path: Path) -> None:
        """Write a consistent copy of the spool, while other processes may write.

        Raises:
            SpoolError: the spool cannot be read, or the copy cannot be written.
        """
        with (
            self._explained("copy it"),
            closing(_connect(self.path, read_only=True, create=False)) as source,
            closing(sqlite3.connect(path)) as copy,
        ):
            source.backup(copy)

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self, operation: str, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction, rolled back if the block or the commit raises.

        Raises:
            SettingsError: as `check_not_replaced`, after a write.
        """
        with self._lock:
            with self._explained(operation):
                if self._connection is None:
                    raise SpoolError(f"spool {self.path} is closed")
                self._connection.execute(begin)
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            if begin == "BEGIN IMMEDIATE":
                self.check_not_replaced()

    def _current_file_ids(self) -> list[tuple[int, int] | None]:
        return [_file_id(self.path), _file_id(self.path.with_name(f"{self.path.name}-wal"))]

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        try:
            yield
        # Damaged contents raise more than sqlite's errors; a damaged schema may even request endless memory.
        except (sqlite3.Error, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise SpoolError(f"spool {self.path}: cannot {operation}: {error}") from error


def is_initialized_spool(path: Path) -> bool:
    """Return whether a file exists and is more than an empty database that its creator has not filled yet."""
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
    except sqlite3.Error:  # opening the file as a spool reports the error
        return True


def read_calls(
    connection: sqlite3.Connection, condition: str = "1 = 1", values: Sequence[int] = ()
) -> Iterator[tuple[int, int, int, StoredMessage | None]]:
    """Yield (group, sample, number, call), in order; the call is None if damaged.

    Args:
        connection: connection of the spool, in a transaction.
        condition: condition on the columns, with a question mark for each of `values`.
    """
    columns = "grp, sample, number, CAST(token AS BLOB), CAST(payload AS BLOB), CAST(sum AS BLOB)"
    query = f"SELECT {columns} FROM calls WHERE {condition} ORDER BY grp, sample, number"
    for group, sample, number, token, payload, checksum in connection.execute(query, values):
        yield group, sample, number, _opened(group, _text(token), payload, checksum, sample, number)


def _read_record(connection: sqlite3.Connection, group: int, token: str) -> StoredMessage | str:
    """Return a record, or why it is missing."""
    try:
        row = connection.execute(_RECORD, (group, token)).fetchone()
    except sqlite3.DatabaseError as error:
        if type(error) is not sqlite3.DatabaseError:  # errors of subclasses concern the whole file
            raise
        return f"group {group}: its record under lease {token} cannot be read: {error}"
    if row is None:
        return f"group {group}: the spool has no record of it under lease {token}"
    return _opened(group, token, *row) or damaged_record(group, token)


def _opened(
    group: int, token: str, payload: object, checksum: object, sample: int = -1, number: int = -1
) -> StoredMessage | None:
    if not isinstance(payload, bytes) or not isinstance(checksum, bytes):
        return None
    found = StoredMessage(group, token, int.from_bytes(checksum), payload, sample, number)
    return found if found.is_whole else None


def _entries(connection: sqlite3.Connection) -> Iterator[tuple[int, JournalEntry | None]]:
    for position, sequence, payload, checksum in connection.execute(_JOURNAL):
        entry = decode_entry(position, payload, checksum)
        yield position, entry if entry and entry.ledger_sequence == sequence else None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _connect(path: Path, *, read_only: bool, create: bool) -> sqlite3.Connection:
    # Readers of a WAL file write to its shared memory, so they open the file for writing and set query_only.
    # In a read-only directory, they open it with mode=ro if a WAL exists, otherwise as immutable.
    how = "mode=rwc" if create else "mode=rw"
    if read_only and not os.access(path.parent, os.W_OK):
        how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        is_new = not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        if is_new and not create:
            raise SpoolError(f"spool {path} is empty: restore the file, or start in a new run directory")
        if found != SCHEMA and not is_new:
            raise SpoolError(
                f"spool {path} was made by another version of tether (schema {found}, this one reads "
                f"{SCHEMA}): continue the run with that version, or start in a new run directory"
            )
        if read_only:
            connection.execute("PRAGMA query_only = ON")
        else:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            if create:
                connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _position(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT COALESCE(MAX(seq), 0) FROM journal").fetchone()[0])
