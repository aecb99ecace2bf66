"""Makes checkpoints and exports, and lets spool and ledger forget what a checkpoint covers."""

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence

from protocol.errors import TetherError
from services.ledger.interface import LedgerStatus, StepRecord
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import OpenRun
from trainer.storage.spool import MissingRecord

log = logging.getLogger("tether.trainer")


class Checkpointer:
    """Makes the checkpoints of a run."""

    def __init__(self, run: OpenRun, runner: ModelRunner) -> None:
        self._run = run
        self._runner = runner

    async def checkpoint(self, status: LedgerStatus, digest: int) -> None:
        """Make a durable checkpoint and an export; only then let spool and ledger forget what it covers.

        Args:
            status: the ledger's, at the version that the model has.
            digest: that of the version's weight manifest.

        Raises:
            TetherError: the checkpoint or the export cannot be written.
        """
        process, began = self._run.process, time.monotonic()
        await self.save(status.version, digest, status.sequence)
        await self._runner.run(self._export, status.version)
        oldest = self._run.checkpoints.complete()[0].manifest  # a trainer may restart from any that is kept
        covered = [record for record in await process.ledger.step_records(0) if record.step < oldest.version]
        try:
            await asyncio.to_thread(self._archive, covered)
        except TetherError as error:  # ledger and spool keep the steps; the next checkpoint tries again
            log.error("archive.failed error=%s", error)
            return
        groups = [group.group for record in covered for group in record.groups]
        if not await self._run.forget(groups, oldest.spool_position):
            return  # the ledger still lists the steps, so the next checkpoint tries again
        await process.ledger.checkpointed(oldest.version)
        process.metrics.seconds.labels("checkpoint").observe(time.monotonic() - began)
        log.info("checkpoint.done version=%d seconds=%.2f", status.version, time.monotonic() - began)

    async def save(self, version: int, digest: int, sequence: int) -> None:
        """Write a checkpoint on every rank; its manifest is written last.

        Args:
            version: committed batches that the weights have seen.
            digest: that of the version's weight manifest.
            sequence: the ledger's.

        Raises:
            TetherError: it cannot be written.
        """
        await self._runner.run(self._save, version, digest, sequence)

    def is_saved(self, version: int, digest: int) -> bool:
        """Return whether a checkpoint of exactly these weights is complete."""
        complete = self._run.checkpoints.complete()
        return any((c.version, c.manifest.digest) == (version, digest) for c in complete)

    def _save(self, version: int, digest: int, sequence: int) -> None:
        with self._run.checkpoints.writing(
            version,
            epoch=self._run.epoch,
            digest=digest,
            sequence=sequence,
            spool_position=self._run.spool.position,
        ) as directory:
            self._runner.rank.save(directory)

    def _archive(self, covered: Sequence[StepRecord]) -> None:
        """Copy the records of steps to the archive and sync their reports, before both may be forgotten."""
        self._run.steps.sync()
        for record in covered:
            keys = [(group.group, group.token) for group in record.groups]
            try:
                payloads = self._run.spool.get_many(keys)
            except MissingRecord as missing:  # an earlier trainer forgot it and ended before the ledger did
                log.warning("archive.missing step=%d error=%s", record.step, missing)
                continue
            records = [(*key, payload) for key, payload in zip(keys, payloads, strict=True)]
            self._run.archive.put(record.step, records)
        self._run.archive.make_room()

    def _export(self, version: int) -> None:
        """Write the model for people and `tether eval`, and remove as old exports as checkpoints."""
        settings = self._run.process.settings
        directory = settings.run_dir / "exports"
        target = directory / f"step_{version:08}"
        shutil.rmtree(target, ignore_errors=True)
        self._runner.rank.export_hf(target, settings.model_dir)
        for old in sorted(directory.glob("step_*"))[: -settings.trainer.keep_checkpoints]:
            for stale in (old, old.with_name(f"adapter_{old.name}")):
                shutil.rmtree(stale, ignore_errors=True)
