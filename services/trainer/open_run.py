"""Holds trainer rank 0's open parts of a run, except the model."""

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
from services.ledger.interface import Taken
from services.run_record.steps import StepLog
from services.runtime.process import Process
from services.runtime.training import train_command
from trainer.data.samples import check_scored
from trainer.step.train_command import TrainCommand, decode_scored
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.spool import Spool, is_made
from trainer.storage.stored import MissingRecords

log = logging.getLogger("tether.trainer")

SPOOL_S = 1.0
"""Seconds between two checks of the spool."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The version that the trainer's model is at, which is committed, and the one that engines get."""

    version: int
    digest: int
    """The digest of the manifest under which it was published, or would be."""
    published: WeightManifest
    """Manifest of the newest published version."""


@dataclass
class OpenRun:
    """The run directory's files, the bus and the epoch of this trainer."""

    process: Process
    epoch: str
    """Under which this trainer holds the run; `reclaim` draws another one."""
    spool: Spool
    archive: Archive
    checkpoints: Checkpoints
    steps: StepLog
    """metrics.jsonl, a line for each committed step."""
    broadcaster: Broadcaster
    """Reaches the engines."""

    async def check_held(self) -> None:
        """Check that this trainer still holds the run, for waits without another call that would show it.

        Raises:
            Refused: STALE_EPOCH, it does not.
        """
        if (epoch := (await self.process.ledger.head()).epoch) != self.epoch:
            raise Refused(Reason.STALE_EPOCH, epoch)

    def read_command(self, batch: Taken, *, mask_late: bool = True) -> TrainCommand:
        """Return the command that trains on a batch; reads its records from the spool. Blocks.

        Raises:
            MissingRecords: (a LookupError) the spool does not hold a group as it was received.
        """
        records = self.spool.get_many([(group.group, group.token) for group in batch.groups])
        return train_command(self.process.settings, batch, records, mask_late=mask_late)

    def unreadable(self, batch: Taken, error: ProtocolError) -> MissingRecords:
        """Return the groups of a batch that cannot be trained, after `error` refused the batch. Blocks.

        Raises:
            ProtocolError: `error` itself, if every record can be read.
            MissingRecords: meanwhile the spool does not hold a group as it was received.
        """
        causes = {}
        for record in self.spool.stored([(group.group, group.token) for group in batch.groups]):
            try:
                check_scored(decode_scored(record.payload), batch.step)
            except ProtocolError as found:
                named = str(found).removeprefix(f"group {record.group}: ")
                causes[record.group, record.token] = f"group {record.group}: {named}"
        if not causes:
            raise error
        return MissingRecords(causes)

    def response_lengths(self, groups: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each sample of those groups whose record the spool holds. Blocks.

        Returns none if a record cannot be read: a measurement does not end a run.
        """
        try:
            records = [decode_scored(payload) for payload in self.spool.find(groups)]
        except TetherError as error:
            log.warning("dropped.unreadable error=%s", error)
            return []
        return [sample_lengths(record.rollout) for record in records]

    async def forget(self, groups: Sequence[int], journal_from: int = 0) -> bool:
        """Delete groups from the spool; returns whether that succeeded, as a later call may try again.

        Args:
            groups: those that were dropped or are covered by a checkpoint.
            journal_from: position before which the journal may be deleted, too; 0 leaves all of it.
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
    """Open the ingest's spool; the trainer never makes one, which the ingest would not write to."""
    path = process.settings.run_dir / "spool.sqlite"
    with process.waiting("the ingest to make the spool"):
        while not await asyncio.to_thread(is_made, path) and not await process.stopped_within(SPOOL_S):
            pass
    return await asyncio.to_thread(lambda: Spool(path, create=False))


async def watch_spool_loop(process: Process, spool: Spool) -> None:
    """Check each second that the spool is the one at its path and the ingest's, until cancelled.

    Raises:
        SettingsError: it is not.
    """
    while True:
        await asyncio.to_thread(spool.check_place)
        known = [peer.info for peer in await process.ledger.peers(Role.INGEST) if "spool" in peer.info]
        newest = max(known, key=lambda info: float(info["started"]), default={"spool": spool.id})
        if newest["spool"] != spool.id:
            raise SettingsError(
                f"the spool {spool.path} is not the one that the ingest writes to: one of them was deleted "
                "or replaced; leave the run directory as it is and start the run again"
            )
        await asyncio.sleep(SPOOL_S)
