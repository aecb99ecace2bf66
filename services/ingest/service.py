"""Runs `python -m services.ingest`: accepts scored groups, also while the trainer restarts.

Consumes: `ScoredRollout`, `ScoreFailure`, `Call` and `Recall`. Produces: spool records, ledger transitions,
the event archive. Waits for: reward and rollout workers. A message is acknowledged once it is on disk and, if
it is a group, accepted by the ledger; one that cannot be stored is not acknowledged, and its sender keeps it.
The ingest also rebuilds a ledger that has lost acknowledged writes
(`services/ledger_recovery/reconcile.py`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from protocol.topics import CALLS, SCORED, Role
from services.bus.receiver import Receiver
from services.ingest.admission import Admission
from services.ingest.call_admission import CallAdmission
from services.ledger_recovery.reconcile import LedgerReconciler
from services.runtime.event_loop import running_loops
from services.runtime.main import service_main
from services.runtime.process import Process
from services.runtime.run_ledger import open_ledger
from trainer.storage.spool import Spool

JUMP_S = 60.0
"""Move against this process's monotonic clock, between two comparisons, that is worth a warning."""
COMPARE_S = 5.0
SLOW_S = 10.0
"""An answer that took longer does not say when the server read its clock; the next one decides."""


class ClockWatch:
    """Compares the server's wall clock with the monotonic clock of this process."""

    def __init__(
        self, wall_ms: Callable[[], Awaitable[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the clock that `wall_ms` reads, in milliseconds; `clock` is in seconds."""
        self._wall_ms, self._clock = wall_ms, clock
        self._offset_s: float | None = None

    async def compare(self) -> float:
        """Return by how many seconds the wall clock has jumped since the last call; warn if by many."""
        asked_at = self._clock()
        wall_s = await self._wall_ms() / 1000
        answered = self._clock()
        if answered - asked_at > SLOW_S:
            return 0.0
        offset_s = wall_s - (asked_at + answered) / 2
        jump_s = 0.0 if self._offset_s is None else offset_s - self._offset_s
        self._offset_s = offset_s
        if abs(jump_s) > JUMP_S:
            log.warning(
                "ledger.clock_jumped seconds=%+.0f (the wall clock of the ledger's server went %s; "
                "leases and registrations last as long as before, the times of events jump)",
                jump_s,
                "back" if jump_s < 0 else "ahead",
            )
        return jump_s

    async def watch_loop(self) -> None:
        """Compare every few seconds, until cancelled."""
        while True:
            await self.compare()
            await asyncio.sleep(COMPARE_S)


log = logging.getLogger("tether.ingest")

ARCHIVE_S = 0.3
"""Seconds between two moves of ledger events to the archive."""


async def serve(process: Process) -> None:
    """Run the ingest until it is stopped; at the end the rest of the event log is archived."""
    run_dir = process.settings.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    spool = await asyncio.to_thread(Spool, run_dir / "spool.sqlite")
    async with open_ledger(process.settings) as unguarded:
        await _serve(process, spool, LedgerReconciler(unguarded, process.settings, spool))


async def _serve(process: Process, spool: Spool, reconciler: LedgerReconciler) -> None:
    try:
        await reconciler.reconcile_and_archive()
        await process.ledger.guard()
        # from here on the archive loop checks a server that was restarted, so it waits for no guarded call
        async with running_loops({"ingest.admission": _admit(process, spool)}):
            await _archive_loop(process, reconciler, spool)
        # not after an error, which it might hide: the next ingest continues where the archive ends
        await reconciler.archive_all()
    finally:
        await asyncio.to_thread(spool.close)


async def _admit(process: Process, spool: Spool) -> None:
    """Register, and admit groups and calls until the process is to stop."""
    async with (
        process.binding_socket(Receiver, SCORED) as receiver,
        process.binding_socket(Receiver, CALLS) as called,
    ):
        process.info["spool"] = spool.id
        process.info["endpoints"] = {SCORED.name: receiver.endpoint, CALLS.name: called.endpoint}
        await process.register()
        journal = CallAdmission(process, called, spool)
        loops = {
            "ingest": Admission(process, receiver, spool).admit_loop(),
            "ingest.call_journal": journal.journal_loop(),
            "ingest.sweep": journal.sweep_loop(),
            "ingest.clock": ClockWatch(process.ledger.wall_ms).watch_loop(),
        }
        async with running_loops(loops):
            await process.stop.wait()


async def _archive_loop(process: Process, reconciler: LedgerReconciler, spool: Spool) -> None:
    """Move the ledger's events to the run directory until the process is to stop.

    Leasing stops while this is more than `ledger.archive_limit` events behind.

    Raises:
        SettingsError: the spool was deleted or replaced.
    """
    while not await process.stopped_within(ARCHIVE_S):
        await asyncio.to_thread(spool.check_place)
        try:
            process.metrics.count("events.archived", await reconciler.reconcile_and_archive())
        except OSError as error:
            process.metrics.count("archive.failed")
            log.error("archive.failed error=%s", error)


def main() -> None:
    """Run `python -m services.ingest`."""
    service_main(Role.INGEST, serve)
