"""Measures how much of the time an engine has work."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class BusyMeter:
    """Counts the seconds in which at least one piece of work was running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at zero; `clock` returns seconds."""
        self._clock = clock
        self._working = 0
        self._busy_s = 0.0
        self._since = clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of the block as busy; blocks may overlap."""
        self._settle()
        self._working += 1
        try:
            yield
        finally:
            self._settle()
            self._working -= 1

    def seconds(self) -> float:
        """Return the busy seconds so far."""
        self._settle()
        return self._busy_s

    def _settle(self) -> None:
        now = self._clock()
        if self._working:
            self._busy_s += now - self._since
        self._since = now


class BusyShare:
    """Share of the time in which engines were busy between two readings of their meters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds: Mapping[str, float] = {}

    def since_last(self, seconds: Mapping[str, float]) -> float:
        """Return the mean over engines since the last call, 0 to 1.

        Args:
            seconds: engine -> reading of its `BusyMeter`. An engine that is read for the first time counts
                from the next call on.
        """
        now = self._clock()
        known = seconds.keys() & self._seconds.keys()
        busy = sum(seconds[engine] - self._seconds[engine] for engine in known)
        share = busy / (len(known) * (now - self._last)) if known and now > self._last else 0.0
        self._last, self._seconds = now, dict(seconds)
        return min(max(share, 0.0), 1.0)
