"""Runs `python -m services.ingest`: accepts scored groups, also while the trainer restarts.

Consumes: `ScoredRollout`, `ScoreFailure`, `Call` and `Recall`. Produces: spool records, ledger transitions,
the event archive. Waits for: reward and rollout workers. A message is acknowledged once it is on disk and,
for a group, accepted by the ledger. A message that cannot be stored is not acknowledged; its sender keeps it.
The ingest also rebuilds a ledger that has lost acknowledged writes (`services/ledger_recovery/reconcile.py`).
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
"""Jump against this process's monotonic clock, between two comparisons, that triggers a warning."""
COMPARE_S = 5.0
SLOW_S = 10.0
"""Answers slower than this are ignored: the time at which the server read its clock is unknown."""


class ClockWatch:
    """Monitor of the server's wall clock, compared with the monotonic clock of this process."""

    def __init__(
        self, wall_ms: Callable[[], Awaitable[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the clock read by `wall_ms`, in milliseconds; `clock` is in seconds."""
        self._wall_ms, self._clock = wall_ms, clock
        self._offset_s: float | None = None

    async def compare(self) -> float:
        """Return by how many seconds the wall clock has jumped since the last call; warn above `JUMP_S`."""
        request_s = self._clock()
        wall_s = await self._wall_ms() / 1000
        response_s = self._clock()
        if response_s - request_s > SLOW_S:
            return 0.0
        offset_s = wall_s - (request_s + response_s) / 2
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
        """Compare the clocks every `COMPARE_S`, until cancelled."""
        while True:
            await self.compare()
            await asyncio.sleep(COMPARE_S)


log = logging.getLogger("tether.ingest")

ARCHIVE_S = 0.3
"""Seconds between two copies of ledger events to the archive."""


async def serve(process: Process) -> None:
    """Run the ingest until it is stopped, then archive the remaining events."""
    run_dir = process.settings.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    spool = await asyncio.to_thread(Spool, run_dir / "spool.sqlite")
    async with open_ledger(process.settings) as unguarded:
        await _serve(process, spool, LedgerReconciler(unguarded, process.settings, spool))


async def _serve(process: Process, spool: Spool, reconciler: LedgerReconciler) -> None:
    try:
        await reconciler.reconcile_and_archive()
        await process.ledger.guard()
        # The archive loop checks a restarted server, so it must not wait for guarded calls itself.
        async with running_loops({"ingest.admission": _admit(process, spool)}):
            await _archive_loop(process, reconciler, spool)
        # Not after an error, which this call might hide: the next ingest continues the archive.
        await reconciler.archive_all()
    finally:
        await asyncio.to_thread(spool.close)


async def _admit(process: Process, spool: Spool) -> None:
    """Register, then admit groups and calls until the process is to stop."""
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
    """Archive the ledger's events in the run directory until the process is to stop.

    The ledger grants no leases while more than `ledger.archive_limit` events are not archived.

    Raises:
        SettingsError: the spool was deleted or replaced.
    """
    while not await process.stopped_within(ARCHIVE_S):
        await asyncio.to_thread(spool.check_not_replaced)
        try:
            process.metrics.count("events.archived", await reconciler.reconcile_and_archive())
        except OSError as error:
            process.metrics.count("archive.failed")
            log.error("archive.failed error=%s", error)


def main() -> None:
    """Run `python -m services.ingest`."""
    service_main(Role.INGEST, serve)
