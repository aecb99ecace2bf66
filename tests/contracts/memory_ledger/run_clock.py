"""Keeps the run's clock of the ledger in memory, as `now()` of the scripts keeps the server's.

That one is in `services/ledger/redis/lua/_shared.lua`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

LEAP_MS = 1000
"""Most that the wall clock's move between two readings counts; see `_shared.lua` for the reasons."""
TICK_MS = 100
"""Smallest move that counts; smaller ones wait until they add up to it."""


def wall_ms() -> int:
    """Return the wall clock, in milliseconds of Unix time."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class RunClock:
    """Clock that never goes back, made of one that may; `clock()` reads it, in milliseconds."""

    wall: Callable[[], int] = wall_ms
    """Milliseconds, of a clock that may jump in both directions."""
    reading: int | None = None
    """The clock's value when it moved last; None before it was read."""
    wall_reading: int = 0
    """What `wall` showed then."""

    def __call__(self) -> int:
        wall = self.wall()
        if self.reading is None:
            self.reading, self.wall_reading = wall, wall
        moved = wall - self.wall_reading
        if moved < 0 or moved >= TICK_MS:
            self.reading += max(0, min(moved, LEAP_MS))
            self.wall_reading = wall
        return self.reading
