"""How much of the time an engine has had something to do."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyMeter:
    """Counts the time in which at least one piece of work was going on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._working = 0
        self._busy_s = 0.0
        self._since = self._window = clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Note that work goes on while the block runs; blocks may overlap."""
        self._settle()
        self._working += 1
        try:
            yield
        finally:
            self._settle()
            self._working -= 1

    def fraction(self) -> float:
        """Busy share of the time since the last call, 0 to 1."""
        self._settle()
        now = self._clock()
        share = self._busy_s / max(now - self._window, 1e-9)
        self._window, self._busy_s = now, 0.0
        return min(share, 1.0)

    def _settle(self) -> None:
        now = self._clock()
        if self._working:
            self._busy_s += now - self._since
        self._since = now
