"""Explains why the ledger refuses a trainer that held the run."""

import asyncio
import contextlib
from pathlib import Path

from protocol.errors import TetherError
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import LedgerEvent, RebuildEvent, decode_fields, decode_line
from services.ledger.interface import Ledger

MAX_EVENTS = 10_000
"""Maximum number of unarchived events read; after a rebuild, the first one is its event."""


async def fence_reason(ledger: Ledger, run_dir: Path, run: str) -> str:
    """Return what fenced the trainer: a rebuild of the ledger, or another trainer.

    Reads the whole event log once. If the log cannot be read, the answer is another trainer.
    """
    with contextlib.suppress(TetherError, OSError):
        epoch = (await ledger.head()).epoch
        events = await ledger.events(0, MAX_EVENTS)  # read before the archive, to which events move
        if any(_is_rebuild(decode_fields(event), epoch) for event in events) or await asyncio.to_thread(
            _is_archived_rebuild, run_dir / FILE, epoch
        ):
            return f"the ledger of run {run} lost writes and was rebuilt (ledger.rebuilt in logs/ingest.log)"
    return f"another trainer has taken over run {run}"


def _is_archived_rebuild(path: Path, epoch: str) -> bool:
    name = epoch.encode()
    with path.open("rb") as log:
        return any(
            _is_rebuild(decode_line(line), epoch) for line in log if b'"rebuild"' in line and name in line
        )


def _is_rebuild(event: LedgerEvent, epoch: str) -> bool:
    return isinstance(event, RebuildEvent) and event.epoch == epoch
