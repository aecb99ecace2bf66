"""Archives ledger events and rebuilds the ledger after its server lost acknowledged writes.

Redis loses writes when it crashes without syncing its append-only file, fails over to a replica, or is
flushed. Acknowledged writes are on local disk: the archive contains every event up to its last line, and the
spool's journal the later accepts and commits. A ledger that ends before archive or journal has lost writes. A
restarted server that does not sync each write may have lost writes, too.
"""

import asyncio
import logging
import time
from contextlib import closing

from protocol.errors import Reason, Refused, SettingsError
from protocol.ids import new_epoch
from services.ledger.event_log.archiver import FILE as AUDIT_LOG
from services.ledger.event_log.archiver import Archiver, LostWrites, last_sequence
from services.ledger.event_log.reader import read_events
from services.ledger.interface import RunSpec
from services.ledger.redis.ledger import RedisLedger
from services.ledger_recovery.journal_entries import entry_report, replayable_events
from services.ledger_recovery.restore import SnapshotBuilder
from services.runtime.run_ledger import status_if_created
from services.settings.load import FILE
from services.settings.sections import Settings
from trainer.storage.spool import Spool
from trainer.storage.stored import JournalEntry

log = logging.getLogger("tether.keeper")

CREATE_SEQUENCE = 1
"""Number of the event that creates a run; a start may end before it writes the settings."""
MAX_TRIES = 20
"""Maximum number of attempts at a rebuild, which restarts after a concurrent write to the ledger."""


LARGE_REBUILD_EVENTS = 100_000
"""Number of events from which a rebuild takes seconds and is also logged at its start."""


class LedgerReconciler:
    """Reconciler of one run's ledger with its archive and journal.

    The ingest uses one while it runs, and `tether up` before it starts the ingest.
    """

    def __init__(self, ledger: RedisLedger, settings: Settings, spool: Spool) -> None:
        """Store a ledger with its own, unguarded connection."""
        self._ledger = ledger
        self._settings = settings
        self._spool = spool
        self._archiver = Archiver(ledger, settings.run_dir)
        self._server = ""
        """Id of the server process on which the ledger was last compared."""

    async def reconcile_and_archive(self) -> int:
        """Archive new events, at most one batch; first rebuild the ledger if it lost writes.

        Returns:
            The number of archived events; 0 after a rebuild.

        Raises:
            SettingsError: the ledger lost writes and the archive lacks them.
            TetherError, OSError: as `Archiver.archive`.
        """
        server, reconciled = await self._ledger.reconciled_server()
        try:
            if server != self._server or server != reconciled:
                await self._reconcile(server, reconciled)
            return await self._archiver.archive()
        except LostWrites as lost:
            log.warning("ledger.lost_writes %s", lost)
        except Refused as refusal:
            if refusal.reason is not Reason.NO_RUN:
                raise
            log.warning("ledger.lost_run")
        await self._rebuild()
        return 0

    async def archive_all(self) -> None:
        """Archive until no event is left."""
        while await self.reconcile_and_archive():
            pass

    async def _reconcile(self, server: str, reconciled: str) -> None:
        """Compare the ledger on a new server process with the files on disk."""
        last_known = await asyncio.to_thread(self._last_known)
        last_event = await self._last_sequence()
        if last_event < 0 and not last_known:
            return  # the run is not created yet
        if last_event < last_known:
            log.warning("ledger.lost_writes found=%d known=%d", last_event, last_known)
            await self._rebuild()
        elif reconciled and reconciled != server and (problem := await self._ledger.check_durability()):
            log.warning("ledger.restarted %s", problem)
            await self._rebuild()
        await self._ledger.set_reconciled_server(server)
        self._server = server

    def _last_known(self) -> int:
        return max(last_sequence(self._archiver.path), self._spool.ledger_sequence)

    async def _last_sequence(self) -> int:
        status = await status_if_created(self._ledger)
        return -1 if status is None else status.sequence

    async def _rebuild(self) -> None:
        """Rebuild the ledger from archive and journal; restart after a concurrent write."""
        began, known = time.monotonic(), await asyncio.to_thread(self._last_known)
        if known >= LARGE_REBUILD_EVENTS:
            path = self._archiver.path
            size = path.stat().st_size if path.is_file() else 0
            log.warning("ledger.rebuilding events=%d archive_bytes=%d", known, size)
        for _ in range(MAX_TRIES):
            while await self._archive_remaining():
                pass
            last_event = await self._last_sequence()
            builder, reports = await asyncio.to_thread(self._read)
            snapshot = builder.snapshot(
                epoch=new_epoch(),
                last_event=last_event,
                sequence=max(await asyncio.to_thread(self._last_known), last_event),
                reports=reports,
            )
            try:
                await self._ledger.rebuild(self._spec(builder), snapshot)
            except Refused as refusal:
                if refusal.reason is not Reason.WRONG_STATE:
                    raise
                continue
            log.warning(
                "ledger.rebuilt after=%d sequence=%d version=%d scored=%d waiting=%d journal_events=%d "
                "seconds=%.1f",
                snapshot.after,
                snapshot.sequence,
                snapshot.version,
                len(snapshot.scored),
                len(snapshot.waiting),
                len(snapshot.journal_events),
                time.monotonic() - began,
            )
            if bound := builder.pending:
                await self._ledger.set_bound(
                    max_staleness=bound.max_staleness,
                    groups_per_step=bound.groups_per_step,
                    policy=bound.policy,
                )
            return
        raise LostWrites(
            f"the ledger cannot be rebuilt: other processes wrote to it during all {MAX_TRIES} attempts"
        )

    def _spec(self, builder: SnapshotBuilder) -> RunSpec:
        """Return the run's specification from the archive, with the drop limits of the settings."""
        limits = self._settings.bound
        return RunSpec(
            run=self._settings.run.name,
            fingerprint=builder.fingerprint,
            prompts=builder.prompts,
            steps=max(builder.steps, builder.version),
            bound=builder.bound,
            max_attempts=limits.max_attempts,
            drop_share=limits.drop_share,
            drop_window=limits.drop_window,
        )

    def _journal(self) -> list[JournalEntry]:
        """Return the journal. Raises SettingsError if an entry is damaged: its step would be repeated."""
        entries = self._spool.journal()
        intact = [entry for entry in entries if entry is not None]
        if len(intact) < len(entries):
            damaged = next(item.what for item in self._spool.damaged() if item.group < 0)
            raise SettingsError(
                f"the ledger lost writes, and {damaged} in {self._spool.path} is damaged, so it cannot be "
                "rebuilt: check the disk, and start in a new run directory, from the newest export"
            )
        return intact

    async def _archive_remaining(self) -> int:
        """Archive events that the server still has."""
        try:
            return await self._archiver.archive()
        except (LostWrites, Refused):
            return 0

    def _read(self) -> tuple[SnapshotBuilder, dict[int, bytes]]:
        """Replay archive and journal; return the state and the reports of the steps."""
        builder, path = SnapshotBuilder(), self._archiver.path
        reports: dict[int, bytes] = {}
        if path.is_file():
            for event in read_events(path):
                builder.apply(event)
        if not builder.fingerprint:
            raise SettingsError(
                f"the ledger lost writes, and {path} does not hold the start of the run: "
                "point TETHER_REDIS_URL at the server that has the run, or start in a new run directory"
            )
        archived, journal = builder.sequence, self._journal()
        last_event = min((entry.ledger_sequence for entry in journal), default=0)
        if last_event > archived and journal[0].position > 1:  # the newest deletable entry is always kept
            raise SettingsError(
                f"the ledger lost writes, {path} ends at event {archived}, "
                f"and the journal begins after event {last_event}: the events between are lost; "
                "restore the whole archive, or start in a new run directory"
            )
        for entry in journal:
            if entry.ledger_sequence > archived:
                for journal_event in replayable_events(entry):
                    builder.apply_journal(journal_event)
            if (report := entry_report(entry)) is not None:
                reports[entry.step] = report
        return builder, reports


async def reconcile(ledger: RedisLedger, settings: Settings) -> None:
    """Rebuild the ledger if it lost writes, before services use it; return at once for a new run.

    Raises:
        SettingsError: the ledger lost writes and the archive lacks them, or the run was made in another
            directory.
    """
    status = await status_if_created(ledger)
    run_dir = settings.run_dir
    has_local_files = (run_dir / FILE).exists() or (run_dir / AUDIT_LOG).exists()
    if status is not None and status.sequence > CREATE_SEQUENCE and not has_local_files:
        raise SettingsError(
            f"run {settings.run.name} in this ledger was made in another directory: {run_dir} has neither "
            f"{FILE} nor {AUDIT_LOG}; continue it there, or give this run another run.name"
        )
    spool = await asyncio.to_thread(Spool, settings.run_dir / "spool.sqlite")
    with closing(spool):
        await LedgerReconciler(ledger, settings, spool).reconcile_and_archive()
