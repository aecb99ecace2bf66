"""Warns when the wall clock of the ledger's server jumps. Only the dates of events come from it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger("tether.clock")

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
