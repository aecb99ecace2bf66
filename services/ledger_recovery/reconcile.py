"""Keeps the ledger whole: moves its events to the archive, and builds it anew when its server has lost
acknowledged writes.

Redis loses writes when it crashes with a weak append-only file, fails over to a replica, or is flushed. What
was acknowledged is on disk here: the archive holds every event up to its last line, the journal in the spool
the accepts and commits that came after it. A ledger that ends before either of them lost something. So may
have any server that was started again and does not sync each write.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from protocol.errors import Reason, Refused, SettingsError
from protocol.ids import new_epoch
from services.ledger.event_log.archiver import Archiver, LostWrites, last_sequence
from services.ledger.interface import RunSpec
from services.ledger.redis.ledger import RedisLedger
from services.ledger_recovery.journal_entries import replayable_events, report_of
from services.ledger_recovery.restore import SnapshotBuilder
from services.settings.sections import Settings
from trainer.storage.spool import Spool

log = logging.getLogger("tether.keeper")

TRIES = 20
"""How often a rebuild starts again because somebody wrote to the ledger meanwhile."""


class LedgerReconciler:
    """One for a run: the ingest has it, and `tether up` before there is an ingest."""

    def __init__(self, ledger: RedisLedger, settings: Settings, spool: Spool) -> None:
        """`ledger` is a connection of its own, not guarded."""
        self._ledger = ledger
        self._settings = settings
        self._spool = spool
        self._archiver = Archiver(ledger, settings.run_dir)
        self._server = ""

    async def reconcile_and_archive(self) -> int:
        """Archive what is new, at most one batch, after making sure that the ledger is whole. Returns the
        number of events archived.

        Raises:
            SettingsError: if the ledger lost writes and the archive is not there to tell them.
            TetherError, OSError: as `Archiver.archive` does.
        """
        server, noted = await self._ledger.looked_at()
        try:
            if server != self._server or server != noted:
                await self._settle(server, noted)
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
        """Archive until nothing is left."""
        while await self.reconcile_and_archive():
            pass

    async def _settle(self, server: str, noted: str) -> None:
        """Compare the ledger with what is on disk, on a server process that is new to us."""
        known = await asyncio.to_thread(self._last_known)
        found = await self._found()
        if found < 0 and not known:
            return  # the run is still to be created
        if found < known:
            log.warning("ledger.lost_writes found=%d known=%d", found, known)
            await self._rebuild()
        elif noted and noted != server and (weak := await self._ledger.promise()):
            log.warning("ledger.restarted %s", weak)
            await self._rebuild()
        await self._ledger.note_server(server)
        self._server = server

    def _last_known(self) -> int:
        return max(last_sequence(self._archiver.path), self._spool.ledger_sequence)

    async def _found(self) -> int:
        try:
            return (await self._ledger.status()).sequence
        except Refused as refusal:
            if refusal.reason is Reason.NO_RUN:
                return -1
            raise

    async def _rebuild(self) -> None:
        """Write the ledger anew from archive and journal. Nobody else can have written meanwhile, or it is
        begun again."""
        for _ in range(TRIES):
            while await self._rescue():
                pass
            found = await self._found()
            restorer, reports = await asyncio.to_thread(self._read)
            snapshot = restorer.snapshot(
                epoch=new_epoch(),
                found=found,
                sequence=max(await asyncio.to_thread(self._last_known), found),
                reports=reports,
            )
            limits = self._settings.bound
            spec = RunSpec(
                run=self._settings.run.name, fingerprint=restorer.fingerprint, prompts=restorer.prompts,
                steps=max(restorer.steps, restorer.version), bound=restorer.bound, max_attempts=limits.max_attempts,
                drop_share=limits.drop_share, drop_window=limits.drop_window,
            )  # fmt: skip
            try:
                await self._ledger.rebuild(spec, snapshot)
            except Refused as refusal:
                if refusal.reason is not Reason.WRONG_STATE:
                    raise
                continue
            log.warning(
                "ledger.rebuilt after=%d sequence=%d version=%d scored=%d waiting=%d told=%d",
                snapshot.after, snapshot.sequence, snapshot.version, len(snapshot.scored), len(snapshot.waiting), len(snapshot.told),
            )  # fmt: skip
            if wanted := restorer.pending:
                await self._ledger.set_bound(
                    max_staleness=wanted.max_staleness,
                    groups_per_step=wanted.groups_per_step,
                    policy=wanted.policy,
                )
            return
        raise LostWrites(f"the ledger cannot be rebuilt: others wrote to it {TRIES} times meanwhile")

    async def _rescue(self) -> int:
        """Archive what the server still has and the archive does not."""
        try:
            return await self._archiver.archive()
        except (LostWrites, Refused):
            return 0

    def _read(self) -> tuple[SnapshotBuilder, dict[int, bytes]]:
        """The run as archive and journal tell it, and the reports of its steps."""
        restorer = SnapshotBuilder()
        reports: dict[int, bytes] = {}
        for event in _events(self._archiver.path):
            restorer.apply(event)
        if not restorer.fingerprint:
            raise SettingsError(
                f"the ledger lost writes, and {self._archiver.path} does not tell how the run began: "
                "point TETHER_REDIS_URL at the server that has the run, or start in a new run directory"
            )
        archived, journal = restorer.sequence, self._spool.journal()
        known = min((entry.ledger_sequence for entry in journal), default=0)
        if known > archived and journal[0].position > 1:  # of what was forgotten, the newest is still there
            raise SettingsError(
                f"the ledger lost writes, {self._archiver.path} ends at event {archived}, and the journal goes on after event {known}: "
                "nobody knows what lies between; put the whole archive back, or start in a new run directory"
            )
        for entry in journal:
            if entry.ledger_sequence > archived:
                for event in replayable_events(entry):
                    restorer.apply_journal(event)
            if (report := report_of(entry)) is not None:
                reports[entry.step] = report
        return restorer, reports


async def reconcile(ledger: RedisLedger, settings: Settings) -> None:
    """Make the ledger whole before anybody uses it; does nothing for a run that is new.

    Raises:
        SettingsError: if the ledger lost writes and the archive is not there to tell them.
    """
    spool = await asyncio.to_thread(Spool, settings.run_dir / "spool.sqlite")
    with closing(spool):
        await LedgerReconciler(ledger, settings, spool).reconcile_and_archive()


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)
