"""Holds the open files, connections and epoch of trainer rank 0, without the model."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import ProtocolError, Reason, Refused, SettingsError, TetherError
from protocol.messages import WeightManifest
from protocol.rollout_view import sample_lengths
from protocol.topics import Role
from services.bus.broadcast import Broadcaster
from services.ledger.event_log.archiver import FILE, last_sequence
from services.ledger.interface import TakenBatch
from services.run_record.steps import StepLog
from services.runtime.process import Process
from services.runtime.training import train_command
from trainer.data.samples import check_scored
from trainer.step.train_command import TrainCommand, decode_scored
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.spool import Spool, is_initialized_spool
from trainer.storage.stored import MissingRecords

log = logging.getLogger("tether.trainer")

SPOOL_S = 1.0
"""Seconds between two checks of the spool."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The committed version of the trainer's model, and the version that engines load."""

    version: int
    digest: int
    """Digest of the version's manifest, or the digest it would be published under."""
    published: WeightManifest
    """Manifest of the newest published version."""


@dataclass
class OpenRun:
    """The run directory's files, the bus and the epoch of this trainer."""

    process: Process
    epoch: str
    """Epoch under which this trainer holds the run; `reclaim` draws another one."""
    spool: Spool
    archive: Archive
    checkpoints: Checkpoints
    steps: StepLog
    """metrics.jsonl, one line per committed step."""
    broadcaster: Broadcaster
    """Broadcasts to the engines."""

    async def check_ownership(self) -> None:
        """Check that this trainer still holds the run. Use in waits without other calls to the ledger.

        Raises:
            Refused: STALE_EPOCH, another trainer holds the run.
        """
        if (epoch := (await self.process.ledger.head()).epoch) != self.epoch:
            raise Refused(Reason.STALE_EPOCH, epoch)

    def read_command(self, batch: TakenBatch, *, mask_late: bool = True) -> TrainCommand:
        """Return the command that trains on a batch, with records read from the spool. Blocks.

        Raises:
            MissingRecords: (a LookupError) the spool lacks a group, or its record is damaged.
        """
        records = self.spool.get_many([(group.group, group.token) for group in batch.groups])
        return train_command(self.process.settings, batch, records, mask_late=mask_late)

    def find_unreadable(self, batch: TakenBatch, error: ProtocolError) -> MissingRecords:
        """Return the groups of a batch that cannot be trained, after `error` refused the batch. Blocks.

        Raises:
            ProtocolError: `error` itself, if every record can be read.
            MissingRecords: the spool lacks a group by now, or its record is damaged.
        """
        causes = {}
        for record in self.spool.stored([(group.group, group.token) for group in batch.groups]):
            try:
                check_scored(decode_scored(record.payload), batch.step)
            except ProtocolError as damage:
                detail = str(damage).removeprefix(f"group {record.group}: ")
                causes[record.group, record.token] = f"group {record.group}: {detail}"
        if not causes:
            raise error
        return MissingRecords(causes)

    def response_lengths(self, groups: Sequence[int]) -> list[list[int]]:
        """Return the number of tokens of each sample, for each group whose record the spool holds. Blocks.

        Returns an empty list if a record cannot be read: a measurement does not end a run.
        """
        try:
            records = [decode_scored(payload) for payload in self.spool.find(groups)]
        except TetherError as error:
            log.warning("dropped.unreadable error=%s", error)
            return []
        return [sample_lengths(record.rollout) for record in records]

    async def forget(self, groups: Sequence[int], journal_from: int = 0) -> bool:
        """Delete groups from the spool; return whether that succeeded. A later call may retry.

        Args:
            groups: groups that were dropped or that a checkpoint covers.
            journal_from: position before which the journal may be deleted, too; 0 keeps the whole journal.
        """

        def forget() -> None:
            archived = last_sequence(self.process.settings.run_dir / FILE) if journal_from else 0
            self.spool.forget(groups, journal_from, archived)

        try:
            await asyncio.to_thread(forget)
        except (TetherError, OSError) as error:
            log.warning("spool.forget_failed error=%s", error)
            return False
        return True


async def open_spool(process: Process) -> Spool:
    """Wait for the ingest to create the spool, then open it. The trainer itself never creates a spool."""
    path = process.settings.run_dir / "spool.sqlite"
    with process.waiting("the ingest to make the spool"):
        while not await asyncio.to_thread(is_initialized_spool, path) and not await process.stopped_within(
            SPOOL_S
        ):
            pass
    return await asyncio.to_thread(lambda: Spool(path, create=False))


async def watch_spool_loop(process: Process, spool: Spool) -> None:
    """Check every second that the spool at its path is unchanged and the ingest's, until cancelled.

    Raises:
        SettingsError: the file was replaced, or the ingest writes to another spool.
    """
    while True:
        await asyncio.to_thread(spool.check_not_replaced)
        known = [peer.info for peer in await process.ledger.peers(Role.INGEST) if "spool" in peer.info]
        newest = max(known, key=lambda info: float(info["started"]), default={"spool": spool.id})
        if newest["spool"] != spool.id:
            raise SettingsError(
                f"the spool {spool.path} is not the one that the ingest writes to: one of them was deleted "
                "or replaced; leave the run directory as it is and start the run again"
            )
        await asyncio.sleep(SPOOL_S)
