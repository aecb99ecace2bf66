"""Archives the event log of a run: copies events from the ledger to a file, one JSON line per event.

`events.py` defines the events. Each line ends with one additional field, `chain` (see `hash_chain.py`). Lines
keep all fields of the ledger's JSON in order, including fields that this version does not know.
`services/ledger/verify` proves the bound from the archive alone.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError, TetherError
from protocol.host.file_lock import locked
from services.ledger.event_log.events import decode_line
from services.ledger.event_log.hash_chain import append, last_line
from services.ledger.interface import Ledger

FILE = "audit.jsonl"
"""Name of the archive in the run directory."""
LOCK_TIMEOUT_S = 5.0
"""Seconds to wait while another archiver of the run holds the file's lock."""


class LostWrites(TetherError):
    """The ledger has lost acknowledged writes; see `services/ledger_recovery/reconcile.py`."""


class Archiver:
    """Copies a ledger's events to a file, then lets the ledger forget the events on disk."""

    def __init__(self, ledger: Ledger, directory: Path, batch: int = 2000) -> None:
        """Archive the run in `directory`; each call copies at most `batch` events."""
        self.path = Path(directory) / FILE
        self._ledger = ledger
        self._batch = batch

    async def archive(self) -> int:
        """Copy new events, at most one batch.

        If cancelled, the ledger may still hold events that are on disk; the next call skips them.

        Returns:
            The number of events copied, by this or another archiver of the run.

        Raises:
            LostWrites: the ledger's log ends before the file does.
            SettingsError: the file was deleted, cut or replaced; ledger and file are unchanged.
            OSError: the file cannot be written, or another archiver holds it for `LOCK_TIMEOUT_S`; the ledger
                keeps the events.
        """
        last = await asyncio.to_thread(last_sequence, self.path)
        events = await self._ledger.events(last, self._batch)
        if events:
            first = events[0]["seq"]
            follows = first == last + 1 or events[0].get("after") == last  # the latter after a `rebuild`
            if not follows and await asyncio.to_thread(last_sequence, self.path) == last:
                raise _damaged(self.path, f"ends at event {last}, and the ledger begins at event {first}")
            if not follows or not await asyncio.to_thread(_add, self.path, events, last):
                return len(events)
            last = int(events[-1]["seq"])
        if last:
            head = await self._ledger.head()
            if head.sequence < last:
                raise LostWrites(
                    f"the ledger is at event {head.sequence}, {self.path} at {last}: "
                    "the ledger lost acknowledged writes"
                )
            await self._ledger.archived(last)
        return len(events)

    async def archive_all(self) -> None:
        """Copy all events of the ledger, at the end of a run."""
        while await self.archive():
            pass


def last_sequence(path: Path) -> int:
    """Return the number of the last complete line, 0 without one; truncate a torn last line.

    Raises:
        SettingsError: the last complete line is not an event.
        OSError: another archiver holds the file for `LOCK_TIMEOUT_S`.
    """
    if not path.is_file():
        return 0
    with locked(path.parent, timeout_s=LOCK_TIMEOUT_S):
        return _last_sequence(path)


def _add(path: Path, events: Sequence[Mapping[str, Any]], last: int) -> bool:
    """Append events after event `last`, durably.

    Returns:
        False, without a write, if another archiver of the run has already appended events.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent, timeout_s=LOCK_TIMEOUT_S):  # two ingests of a run may overlap for a while
        if _last_sequence(path) != last:
            return False
        append(path, (json.dumps(event, separators=(",", ":")).encode() for event in events))
    return True


def _last_sequence(path: Path) -> int:
    try:
        file = open(path, "r+b")  # noqa: SIM115
    except FileNotFoundError:
        return 0
    with file:
        end, line = last_line(file.fileno())
        if end < os.fstat(file.fileno()).st_size:
            file.truncate(end)
            os.fsync(file.fileno())
        if not line:
            return 0
        event = decode_line(line)
        if event.seq < 1:
            raise _damaged(path, f"has a last line that is not an event ({event.kind})")
        return event.seq


def _damaged(path: Path, problem: str) -> SettingsError:
    """Return the error for an archive that does not match the ledger's log."""
    return SettingsError(
        f"{path} {problem}: the file was deleted, cut or replaced. Put the whole file back and start the run "
        "again, which then resumes. Without it the run cannot continue: with run.remote start it in an empty "
        "run.dir, where it resumes from its newest copy; otherwise begin a new run with model.path at the "
        f"newest of {path.parent / 'exports'}"
    )
