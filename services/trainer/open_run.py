"""Holds what trainer rank 0 has open of a run beside the model."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.codec import decode_payload
from protocol.errors import TetherError
from protocol.messages import ScoredRollout
from protocol.rollout_view import sample_lengths
from services.bus.broadcast import Broadcaster
from services.ledger.event_log.archiver import FILE, last_sequence
from services.ledger.interface import Taken
from services.observability.steps import StepLog
from services.runtime.process import Process
from services.runtime.training import train_command
from trainer.backends.rank_commands import TrainCommand
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.spool import Spool

log = logging.getLogger("tether.trainer")


@dataclass(frozen=True)
class OpenRun:
    """The run directory's files, the bus and the epoch of this trainer."""

    process: Process
    epoch: str
    """Under which this trainer claims the run."""
    spool: Spool
    archive: Archive
    checkpoints: Checkpoints
    steps: StepLog
    """metrics.jsonl, a line for each committed step."""
    broadcaster: Broadcaster
    """Reaches the engines."""

    def read_command(self, taken: Taken, *, mask_late: bool = True) -> TrainCommand:
        """Return the command that trains on a batch; reads its records from the spool. Blocks.

        Raises:
            MissingRecord: (a LookupError) the spool does not hold a group.
        """
        records = self.spool.get_many([(group.group, group.token) for group in taken.groups])
        return train_command(self.process.settings, taken, records, mask_late=mask_late)

    def response_lengths(self, groups: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each sample of those groups whose record the spool holds. Blocks.

        Returns nothing if a record cannot be read: a measurement does not end a run.
        """
        try:
            messages = [decode_payload(payload) for payload in self.spool.find(groups)]
        except TetherError as error:
            log.warning("dropped.unreadable error=%s", error)
            return []
        return [sample_lengths(m.rollout) for m in messages if isinstance(m, ScoredRollout)]

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
