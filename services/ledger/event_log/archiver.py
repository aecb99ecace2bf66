"""The event log of a run, and how it gets out of the ledger into a file.

Every script appends one event per state change; `seq` counts up without gaps from 1 over the life of the run.
Each event has `seq`, `time_ms` (the server's clock) and `event`; empty lists are left out.

| event | further fields | state change |
|---|---|---|
| create | fingerprint, prompts (-1: no end), steps, max_staleness, groups_per_step, policy | the run exists |
| steps | steps | the run's length |
| applied | engine, epoch, version | an engine serves that version |
| lease | group, token, holder, engine, epoch, version, deadline, bound, groups_per_step, policy, attempt | any -> LEASED |
| expire | group | the lease has run out and gives up its place in rule F |
| extend | group, token | an expired lease has its place again (extending a live one is no event) |
| release | group, token, reason | LEASED -> WAITING |
| accept | group, token, counts {version: tokens}, reward (mean over its samples, if it was said) | LEASED -> SCORED |
| lost | group, token | SCORED -> WAITING |
| drop | group, token, from (state), reason, detail, wasted_tokens | WAITING, LEASED or SCORED -> DROPPED |
| halt | reason | leasing has stopped: too many drops for that reason |
| unhalt | reason | leases are granted again; drops, and attempts of WAITING and LEASED groups, are counted anew |
| claim | epoch, untaken [group] | a new trainer; TAKEN -> SCORED |
| resume | epoch, version, digest, continued, waiting [group] | the branch goes on, or a rewind: those groups -> WAITING |
| rebuild | epoch, after, version, issued, trained, dropped, scored [group], waiting [group], told [event] | the ledger had lost writes: \
 events after `after` are lost, but for the accepts and commits `told` by the journal (see `restore.py`);
 leased and taken groups go back |
| take | epoch, step, groups [group] | SCORED -> TAKEN |
| commit | epoch, step, version, digest, groups {group: {version: tokens}}, issued, trained, dropped, active | TAKEN -> TRAINED |
| publish | epoch, version | a manifest without a commit |
| bound_pending | max_staleness, groups_per_step, policy | a change was asked for that rule F does not allow yet |
| bound | max_staleness, groups_per_step, policy | the bound in force |
| drain | on | whether leases are granted |
| checkpoint | version | steps below `version` are durable |

In the file each line has one more field, `chain`, at its end (see `services/ledger/event_log/hash_chain.py`).
Digests are decimal strings (JSON numbers end at 53 bits). `verify` (see `services/ledger/verify/verifier.py`)
proves the bound from the log alone.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import TetherError
from services.ledger.event_log.hash_chain import append
from services.ledger.interface import Ledger
from services.ledger.verify.result import AuditResult
from services.ledger.verify.verifier import verify

__all__ = ["FILE", "Archiver", "AuditResult", "last_sequence", "verify"]

FILE = "audit.jsonl"
"""Name of the archive in a run's directory."""
HELD_S = 5.0
"""How long another archiver of the run is waited for."""
_TAIL = 1 << 16


class LostWrites(TetherError):
    """The ledger does not know what it has acknowledged; see `services/ledger_recovery/reconcile.py`."""


class Archiver:
    """Copies a ledger's events to a file, one JSON line each, and lets the ledger forget them once they are
    on disk."""

    def __init__(self, ledger: Ledger, directory: Path, batch: int = 2000) -> None:
        """`directory`: that of the run. `batch`: events copied in one go."""
        self.path = Path(directory) / FILE
        self._ledger = ledger
        self._batch = batch

    async def archive(self) -> int:
        """Copy what is new, at most one batch, and return the number of events copied, by this or another
        archiver of the run.

        Cancelled, it may leave whole lines that the ledger still holds too; the next call does not copy them
        again.

        Raises:
            LostWrites: if the ledger's log ends before the file does.
            TetherError: if the ledger's log does not go on where the file ends: the file has lost events.
            OSError: if the file cannot be written, or another archiver holds it for long; the ledger
                keeps the events.
        """
        last = await asyncio.to_thread(last_sequence, self.path)
        events = await self._ledger.events(last, self._batch)
        if events:
            follows = (
                events[0]["seq"] == last + 1 or events[0].get("after") == last
            )  # the latter is a `rebuild`
            if not follows and await asyncio.to_thread(last_sequence, self.path) == last:
                raise TetherError(
                    f"{self.path} ends at event {last}, the ledger goes on at {events[0]['seq']}: events are missing"
                )
            if not follows or not await asyncio.to_thread(_add, self.path, events, last):
                return len(events)
            last = int(events[-1]["seq"])
        if last:
            head = await self._ledger.head()
            if head.sequence < last:
                raise LostWrites(
                    f"the ledger is at event {head.sequence}, {self.path} at {last}: the ledger lost acknowledged writes"
                )
            await self._ledger.archived(last)
        return len(events)

    async def archive_all(self) -> None:
        """Copy until nothing is left; for the end of a run."""
        while await self.archive():
            pass


def last_sequence(path: Path) -> int:
    """Sequence of the last whole line, 0 if there is none. A torn last line, left by a crash, is cut off.

    Raises:
        TetherError: if the last whole line is not an event.
        OSError: if an archiver holds the file for long.
    """
    if not path.is_file():
        return 0
    with _held(path):
        return _last_sequence(path)


def _add(path: Path, events: Sequence[Mapping[str, Any]], last: int) -> bool:
    """Write events after event `last`, durably. False if the file does not end there any more: another
    archiver of the run was quicker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _held(path):
        if _last_sequence(path) != last:
            return False
        append(path, events)
    return True


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold the directory of a log: an ingest that is ending, or was stopped for a while, and its successor do
    not write at once."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        end = time.monotonic() + HELD_S
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise BlockingIOError(
                        f"{path} is being written by another process, which does not end"
                    ) from error
            time.sleep(0.01)
        yield
    finally:
        os.close(directory)


def _last_sequence(path: Path) -> int:
    try:
        file = open(path, "r+b")  # noqa: SIM115
    except FileNotFoundError:
        return 0
    with file:
        end = file.seek(0, os.SEEK_END)
        tail, start = b"", end
        while start > 0 and tail.count(b"\n") < 2:
            start = max(0, start - _TAIL)
            file.seek(start)
            tail = file.read(end - start)
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            file.truncate(start + len(whole))
            os.fsync(file.fileno())
        if not whole:
            return 0
        try:
            return int(json.loads(whole.splitlines()[-1])["seq"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TetherError(
                f"{path}: the last line is not an event ({error}); move the file away"
            ) from error
