"""The spool: every accepted group on disk, from its acknowledgement until a durable checkpoint covers its
step.

One SQLite file (WAL, synchronous=FULL), written by the ingest and read by the trainer at the same time:

    records(grp, token, payload, accepted_ms)             payload: the encoded `ScoredRollout`, by group and lease token
    journal(seq, event, epoch, step, groups, ledger_seq, details)  accepts and commits in the order in which they were seen

What a method wrote is on disk when it returns. The file must lie on a local disk: WAL needs shared memory
between its users.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import SpoolError

BUSY_S = 30.0
"""How long a write waits for another process's."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    grp INTEGER NOT NULL, token TEXT NOT NULL, payload BLOB NOT NULL, accepted_ms INTEGER NOT NULL, UNIQUE (grp, token)
);
CREATE TABLE IF NOT EXISTS journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL, epoch TEXT NOT NULL, step INTEGER NOT NULL, groups TEXT NOT NULL,
    ledger_seq INTEGER NOT NULL, details TEXT NOT NULL DEFAULT '{}'
);
"""
_PRUNE = """
DELETE FROM journal WHERE seq < ? AND ledger_seq < (SELECT MAX(ledger_seq) FROM journal WHERE seq < ? AND ledger_seq <= ?)
"""
# to a spool that is older than they are
_ADD_DETAILS = "ALTER TABLE journal ADD COLUMN details TEXT NOT NULL DEFAULT '{}'"


class MissingRecord(LookupError):
    """The spool does not hold a group's record; the group is `lost` and has to be generated again."""

    def __init__(self, group: int, token: str) -> None:
        super().__init__(f"group {group}: the spool has no record of it under lease {token}")
        self.group = group
        self.token = token


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Accepts, or a commit."""

    event: str
    """accept or commit."""
    epoch: str
    step: int
    """The step that it belongs to; -1 for an accept."""
    groups: tuple[int, ...]
    ledger_sequence: int
    """Number of the last ledger event that was seen with it."""
    position: int = 0
    """Place in the journal, from 1; set by the spool."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON values from which a ledger that lost the event can be told it again; see
    `services/ledger_recovery/restore.py`."""


class Spool:
    """Safe to use from several threads and processes. Every method blocks; call it off the event loop."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open the spool, and create it unless `read_only`.

        Raises:
            SpoolError: if the file cannot be opened or is not a spool.
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
        """Store records (group, token, payload) with one fsync: all of them are on disk when it returns, none
        if it raises.

        A record that is there already (same group and token) is left as it is.

        Raises:
            SpoolError: the disk is full, or the file cannot be written; nothing was stored.
        """
        now_ms = time.time_ns() // 1_000_000
        rows = [(group, token, payload, now_ms) for group, token, payload in records]
        with self._transaction("write") as connection:
            connection.executemany("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", rows)

    def get_many(self, keys: Sequence[tuple[int, str]]) -> list[bytes]:
        """Payloads in the order of `keys` (group, token), read from one snapshot.

        Raises:
            MissingRecord: (a LookupError) names the first group that is missing.
            SpoolError: if the file cannot be read.
        """
        with self._transaction("read", "BEGIN") as connection:
            found = [
                connection.execute("SELECT payload FROM records WHERE grp = ? AND token = ?", key).fetchone()
                for key in keys
            ]
        for key, row in zip(keys, found, strict=True):
            if row is None:
                raise MissingRecord(*key)
        return [row[0] for row in found]

    def forget(self, groups: Iterable[int], journal_from: int = 0, archived: int = 0) -> int:
        """Delete the records of groups that were dropped, or whose steps a durable checkpoint covers; returns
        how many were deleted.

        Records of all their lease tokens go: nobody will ask for them. So does the journal before the
        position `journal_from`, as far as the archive of the event log has it, which ends at the ledger's
        event `archived`. The newest of what could go stays: that the archive begins to lack it tells later
        that there is a hole between the two.
        """
        rows = [(group,) for group in sorted(set(groups))]
        with self._transaction("write") as connection:
            connection.execute(_PRUNE, (journal_from, journal_from, archived))
            return connection.executemany("DELETE FROM records WHERE grp = ?", rows).rowcount if rows else 0

    def append(self, entries: Iterable[JournalEntry]) -> int:
        """Add entries to the journal with one fsync; returns the new `position`."""
        rows = [
            (e.event, e.epoch, e.step, json.dumps(e.groups), e.ledger_sequence, json.dumps(e.details))
            for e in entries
        ]
        columns = "event, epoch, step, groups, ledger_seq, details"
        with self._transaction("write") as connection:
            connection.executemany(f"INSERT INTO journal ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
            return _position(connection)

    def journal(self) -> list[JournalEntry]:
        """All entries that were not forgotten, in order."""
        with self._transaction("read", "BEGIN") as connection:
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
        with self._transaction("read", "BEGIN") as connection:
            return _position(connection)

    @property
    def ledger_sequence(self) -> int:
        """Highest ledger sequence in the journal; 0 if there is none. A ledger that stands below it has lost
        writes."""
        with self._transaction("read", "BEGIN") as connection:
            return int(connection.execute("SELECT COALESCE(MAX(ledger_seq), 0) FROM journal").fetchone()[0])

    def close(self) -> None:
        """Close the file; idempotent. What was written stays."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def _transaction(self, doing: str, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Run the body in a transaction of its own; rolled back if it raises, also if the commit does."""
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
        # Beside sqlite's own errors those of what is in the file, or is to be; a damaged schema may even ask
        # for endless memory.
        except (sqlite3.Error, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise SpoolError(f"spool {self.path}: cannot {doing}: {error}") from error


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    # A reader of a WAL file takes part in its shared memory, so it opens the file for writing, too, and then
    # forswears writes.
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
