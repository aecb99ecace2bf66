"""Forgets the recorded calls of groups that ended without a record: the trainer will never ask for them.

The ledger says which groups have ended, so no clock can make the ingest delete calls that a session still
needs.
"""

import asyncio
import time
from collections.abc import Callable

from services.ledger.interface import Ledger
from trainer.storage.call_store import CallStore

KEPT_S = 3600.0
"""Seconds, in addition to twice `environment.episode_s`, for which calls are kept after the ledger said that
their group has ended: its session may still play, and send a record that names them."""


class CallSweep:
    """Deletes calls of ended groups, some time after it first found them so."""

    def __init__(
        self,
        ledger: Ledger,
        store: CallStore,
        kept_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a sweep that keeps calls for `kept_s`, by `clock` (seconds), which never goes back."""
        self._ledger, self._store, self._kept_s, self._clock = ledger, store, kept_s, clock
        self._ended_s: dict[int, float] = {}
        """Group -> when it was first found to have ended. At most one entry for each group with calls."""

    async def sweep(self) -> int:
        """Delete due calls; return their number. Cancelled, it may have deleted them.

        Raises:
            Refused: the ledger does not hold the run.
            SpoolError: the spool cannot be read or written; no call was deleted.
        """
        ended = await self._ledger.ended(await asyncio.to_thread(self._store.unscored_groups))
        now = self._clock()
        self._ended_s = {group: self._ended_s.get(group, now) for group in ended}
        due = [group for group, since in self._ended_s.items() if now - since >= self._kept_s]
        return await asyncio.to_thread(self._store.forget_unscored, due)
