"""Spools accepted groups on disk, from their acknowledgement until a durable checkpoint covers their step.

One SQLite file (WAL, synchronous=FULL), written by the ingest and read by the trainer at the same time:

    records(grp, token, payload, accepted_ms)
        payload: the encoded `ScoredRollout`, by group and lease token
    journal(seq, event, epoch, step, groups, ledger_seq, details)
        accepts and commits in the order in which they were seen
    calls(grp, sample, number, token, payload, stored_ms), call_leases(grp, token)
        encoded `Call`s, and the lease of each group that may add some; `calls.py` reads and writes them

Times (Unix, ms) are for people: nothing decides by them.
What a method wrote is on disk when it returns. The file must lie on a local disk: WAL needs shared memory
between its users.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import SpoolError

BUSY_S = 30.0
"""Seconds that a write waits for another process's."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    grp INTEGER NOT NULL, token TEXT NOT NULL, payload BLOB NOT NULL, accepted_ms INTEGER NOT NULL,
    UNIQUE (grp, token)
);
CREATE TABLE IF NOT EXISTS journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL, epoch TEXT NOT NULL, step INTEGER NOT NULL,
    groups TEXT NOT NULL, ledger_seq INTEGER NOT NULL, details TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE IF NOT EXISTS calls (
    grp INTEGER NOT NULL, sample INTEGER NOT NULL, number INTEGER NOT NULL, token TEXT NOT NULL,
    payload BLOB NOT NULL, stored_ms INTEGER NOT NULL, PRIMARY KEY (grp, sample, number)
);
CREATE TABLE IF NOT EXISTS call_leases (grp INTEGER PRIMARY KEY, token TEXT NOT NULL);
"""
_PRUNE = """
DELETE FROM journal WHERE seq < ? AND ledger_seq < (
    SELECT MAX(ledger_seq) FROM journal WHERE seq < ? AND ledger_seq <= ?
)
"""
# for a spool that was made before there were details
_ADD_DETAILS = "ALTER TABLE journal ADD COLUMN details TEXT NOT NULL DEFAULT '{}'"


class MissingRecord(LookupError):
    """The spool does not hold a group's record; the group is `lost` and has to be generated again."""

    def __init__(self, group: int, token: str) -> None:
        super().__init__(f"group {group}: the spool has no record of it under lease {token}")
        self.group = group
        self.token = token


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


class Spool:
    """The spool of a run, safe to use from several threads and processes.

    Every method blocks; call it off the event loop.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open the spool, and create it unless `read_only`.

        Raises:
            SpoolError: the file cannot be opened or is not a spool.
        """
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        if not read_only:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SpoolError(f"spool {path}: {error.strerror or error}") from error
        with self._explained("open"):
            self._connection = _connect(path, read_only)

    def put_many(self, records: Iterable[tuple[int, str, bytes]]) -> None:
        """Store records (group, token, payload) with one fsync: all are on disk on return, none on an error.

        A record that is there already (same group and token) is not replaced.

        Raises:
            SpoolError: the disk is full, or the file cannot be written; nothing was stored.
        """
        now_ms = time.time_ns() // 1_000_000
        rows = [(group, token, payload, now_ms) for group, token, payload in records]
        with self.transaction("write") as connection:
            connection.executemany("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", rows)

    def get_many(self, keys: Sequence[tuple[int, str]]) -> list[bytes]:
        """Return payloads in the order of `keys` (group, token), read from one snapshot.

        Raises:
            MissingRecord: (a LookupError) names the first group that is missing.
            SpoolError: the file cannot be read.
        """
        with self.transaction("read", "BEGIN") as connection:
            found = [
                connection.execute("SELECT payload FROM records WHERE grp = ? AND token = ?", key).fetchone()
                for key in keys
            ]
        for key, row in zip(keys, found, strict=True):
            if row is None:
                raise MissingRecord(*key)
        return [row[0] for row in found]

    def find(self, groups: Iterable[int]) -> list[bytes]:
        """Return the newest payload of each group that has one, whatever its lease.

        Raises:
            SpoolError: the file cannot be read.
        """
        query = "SELECT payload FROM records WHERE grp = ? ORDER BY rowid DESC LIMIT 1"
        with self.transaction("read", "BEGIN") as connection:
            found = [connection.execute(query, (group,)).fetchone() for group in sorted(set(groups))]
        return [row[0] for row in found if row is not None]

    def forget(self, groups: Iterable[int], journal_from: int = 0, archived: int = 0) -> int:
        """Delete groups that were dropped or are covered by a durable checkpoint; returns how many records.

        Records of all their lease tokens are deleted: nobody will ask for them. The newest journal entry that
        could be deleted is kept: if the archive of the event log comes to lack it, that shows a gap between
        archive and journal.

        Args:
            groups: the groups.
            journal_from: position before which the journal is deleted, too, as far as `archived` allows.
            archived: sequence of the last ledger event in the archive of the event log.
        """
        rows = [(group,) for group in sorted(set(groups))]
        with self.transaction("write") as connection:
            connection.execute(_PRUNE, (journal_from, journal_from, archived))
            connection.executemany("DELETE FROM calls WHERE grp = ?", rows)
            connection.executemany("DELETE FROM call_leases WHERE grp = ?", rows)
            return connection.executemany("DELETE FROM records WHERE grp = ?", rows).rowcount if rows else 0

    def append(self, entries: Iterable[JournalEntry]) -> int:
        """Append entries to the journal with one fsync; returns the new `position`."""
        rows = [
            (e.event, e.epoch, e.step, json.dumps(e.groups), e.ledger_sequence, json.dumps(e.details))
            for e in entries
        ]
        columns = "event, epoch, step, groups, ledger_seq, details"
        with self.transaction("write") as connection:
            connection.executemany(f"INSERT INTO journal ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
            return _position(connection)

    def journal(self) -> list[JournalEntry]:
        """Return all entries that were not forgotten, in order."""
        with self.transaction("read", "BEGIN") as connection:
            rows = connection.execute(
                "SELECT event, epoch, step, groups, ledger_seq, seq, details FROM journal ORDER BY seq"
            ).fetchall()
            return [
                JournalEntry(event, epoch, step, _groups(groups), seen, position, json.loads(details))
                for event, epoch, step, groups, seen, position, details in rows
            ]

    @property
    def position(self) -> int:
        """Position of the last journal entry; 0 if there is none. Goes into checkpoints."""
        with self.transaction("read", "BEGIN") as connection:
            return _position(connection)

    @property
    def ledger_sequence(self) -> int:
        """Highest ledger sequence in the journal; 0 if there is none.

        A ledger that is below it has lost writes.
        """
        with self.transaction("read", "BEGIN") as connection:
            return int(connection.execute("SELECT COALESCE(MAX(ledger_seq), 0) FROM journal").fetchone()[0])

    def copy_to(self, path: Path) -> None:
        """Write a copy of the spool as it is at one moment, while others write to it.

        Raises:
            SpoolError: it cannot be read, or the copy not be written.
        """
        with (
            self._explained("copy it"),
            closing(_connect(self.path, read_only=True)) as source,
            closing(sqlite3.connect(path)) as copy,
        ):
            source.backup(copy)

    def close(self) -> None:
        """Close the file; idempotent. What was written stays."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self, doing: str, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction; rolled back if the block or the commit raises."""
        with self._lock, self._explained(doing):
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

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        # Besides sqlite's own errors, those that the content raises; a damaged schema may even ask for
        # endless memory.
        except (sqlite3.Error, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise SpoolError(f"spool {self.path}: cannot {doing}: {error}") from error


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    # A reader of a WAL file takes part in its shared memory, so it opens the file for writing, too, and then
    # forbids itself writes.
    mode = "rw" if read_only else "rwc"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if read_only:
            connection.execute("PRAGMA query_only = ON")
            connection.execute("SELECT seq FROM journal LIMIT 1").fetchall()
        else:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(_SCHEMA)
            if "details" not in [column[1] for column in connection.execute("PRAGMA table_info(journal)")]:
                connection.execute(_ADD_DETAILS)
    except BaseException:
        connection.close()
        raise
    return connection


def _position(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT COALESCE(MAX(seq), 0) FROM journal").fetchone()[0])


def _groups(text: str) -> tuple[int, ...]:
    groups = json.loads(text)
    if not isinstance(groups, list) or not all(isinstance(group, int) for group in groups):
        raise ValueError(f"the journal names groups {text[:80]!r}")
    return tuple(groups)
