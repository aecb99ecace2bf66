"""Stores the calls of sessions in the spool, by group, sample and number.

Only the lease of the last `hold` may add calls to a group; calls of older leases are rejected. Writes are on
disk when a method returns.
"""

import logging
import sqlite3
import time
from collections.abc import Iterable, Sequence

from protocol.messages import Call, Recalled
from trainer.storage.spool import Spool, read_calls
from trainer.storage.stored import StoredMessage

log = logging.getLogger("tether.calls")

MAX_CALLS = 10_000
"""Maximum number of recorded calls of a sample."""
MAX_BYTES = 64 << 20
"""Maximum size of a sample's recorded calls, bytes."""
UNSCORED = "SELECT DISTINCT grp FROM calls WHERE grp NOT IN (SELECT grp FROM records)"
"""Groups that have calls but no record."""
NOT_HELD = "not_held"
FULL = f"full: a sample has at most {MAX_CALLS} recorded calls and {MAX_BYTES >> 20} MiB"
OTHER_CALL_RECORDED = "another call with this number is recorded"


class CallStore:
    """Recorded calls in a spool, safe for several threads and processes. Every method blocks."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def hold(self, group: int, token: str) -> None:
        """Allow only the lease `token` to add calls to a group from now on."""
        with self._spool.transaction("write") as connection:
            connection.execute("INSERT OR REPLACE INTO call_leases VALUES (?, ?)", (group, token))

    def put_many(self, calls: Sequence[tuple[Call, bytes]]) -> list[str]:
        """Store calls, each with its encoded message, with one fsync; return why each was not stored.

        The reason is empty for a call that is stored now or was stored before; otherwise `NOT_HELD`, `FULL`
        or `OTHER_CALL_RECORDED`.

        Raises:
            SpoolError: the disk is full, or the file cannot be written; no call was stored.
        """
        now = time.time_ns() // 1_000_000
        with self._spool.transaction("write") as connection:
            return [_put(connection, call, payload, now) for call, payload in calls]

    def recall(self, group: int, sample: int) -> list[bytes]:
        """Return the encoded calls of a sample by number, from which its session is answered.

        If a call is damaged, all calls of the sample are deleted and the result is empty: a session without
        one of its answers must start over.
        """
        place = (group, sample)
        with self._spool.transaction("write") as connection:
            calls = list(read_calls(connection, "grp = ? AND sample = ?", place))
            damaged = [number for _, _, number, call in calls if call is None]
            if damaged:
                connection.execute("DELETE FROM calls WHERE grp = ? AND sample = ?", place)
        if damaged:
            log.error("calls.damaged group=%d sample=%d numbers=%s forgotten=%d", *place, damaged, len(calls))
            return []
        return [call.payload for *_, call in calls if call is not None]

    def group_calls(self, groups: Iterable[int]) -> list[StoredMessage]:
        """Return the intact calls of groups, ordered by group, sample and number; skip damaged calls."""
        messages: list[StoredMessage] = []
        with self._spool.transaction("read", "BEGIN") as connection:
            for wanted in sorted(set(groups)):
                for group, sample, number, call in read_calls(connection, "grp = ?", (wanted,)):
                    if call is None:
                        log.error("calls.damaged group=%d sample=%d numbers=[%d]", group, sample, number)
                    else:
                        messages.append(call)
        return messages

    def is_held(self, group: int, token: str) -> bool:
        """Return whether a lease may add calls to a group."""
        with self._spool.transaction("read", "BEGIN") as connection:
            query = "SELECT 1 FROM call_leases WHERE grp = ? AND token = ?"
            return connection.execute(query, (group, token)).fetchone() is not None

    def record_groups(self) -> list[int]:
        """Return the groups that have a record."""
        with self._spool.transaction("read", "BEGIN") as connection:
            return [row[0] for row in connection.execute("SELECT DISTINCT grp FROM records ORDER BY grp")]

    def groups(self) -> list[int]:
        """Return the groups that have recorded calls."""
        with self._spool.transaction("read", "BEGIN") as connection:
            return [row[0] for row in connection.execute("SELECT DISTINCT grp FROM calls ORDER BY grp")]

    def unscored_groups(self) -> list[int]:
        """Return the groups that have recorded calls but no record."""
        with self._spool.transaction("read", "BEGIN") as connection:
            return [row[0] for row in connection.execute(UNSCORED)]

    def forget_unscored(self, groups: Iterable[int]) -> int:
        """Delete the calls of the groups in `groups` without a record; return the number of calls."""
        rows = [(group,) for group in sorted(set(groups))]
        with self._spool.transaction("write") as connection:
            unscored = "grp = ? AND grp NOT IN (SELECT grp FROM records)"
            connection.executemany(f"DELETE FROM call_leases WHERE {unscored}", rows)
            return connection.executemany(f"DELETE FROM calls WHERE {unscored}", rows).rowcount if rows else 0


def recalled(calls: Sequence[Call], epoch: str) -> Recalled:
    """Return the reply to a `Recall`: the calls of the last attempt, if they belong to `epoch`."""
    if not calls:
        return Recalled()
    attempt, number = max(call.attempt for call in calls), max(call.number for call in calls) + 1
    last = tuple(call for call in calls if call.attempt == attempt)
    if all(call.epoch == epoch for call in last):
        return Recalled(calls=last, attempt=attempt, number=number)
    return Recalled(attempt=attempt + 1, number=number)


def _put(connection: sqlite3.Connection, call: Call, payload: bytes, now: int) -> str:
    place = (call.group, call.sample)
    holder = connection.execute("SELECT token FROM call_leases WHERE grp = ?", place[:1]).fetchone()
    if holder is None or holder[0] != call.token:
        return NOT_HELD
    stored = connection.execute(
        "SELECT payload FROM calls WHERE grp = ? AND sample = ? AND number = ?", (*place, call.number)
    ).fetchone()
    if stored is not None:
        return "" if stored[0] == payload else OTHER_CALL_RECORDED
    count, size = connection.execute(
        "SELECT COUNT(*), COALESCE(SUM(LENGTH(payload)), 0) FROM calls WHERE grp = ? AND sample = ?", place
    ).fetchone()
    if count >= MAX_CALLS or size + len(payload) > MAX_BYTES:
        return FULL
    checksum = StoredMessage.received(call.group, call.token, payload, call.sample, call.number).checksum
    row = (*place, call.number, call.token, payload, checksum.to_bytes(8), now)
    connection.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    return ""
