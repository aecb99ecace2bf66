"""How much of the time an engine has had something to do."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class BusyMeter:
    """Counts the time in which at least one piece of work was going on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._working = 0
        self._busy_s = 0.0
        self._since = clock()

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

    def seconds(self) -> float:
        """Busy seconds so far."""
        self._settle()
        return self._busy_s

    def _settle(self) -> None:
        now = self._clock()
        if self._working:
            self._busy_s += now - self._since
        self._since = now


class BusyShare:
    """The share of time in which engines were busy between two looks at their meters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds: Mapping[str, float] = {}

    def since_last(self, seconds: Mapping[str, float]) -> float:
        """Mean over engines, 0 to 1. `seconds`: engine -> what its meter says; an engine seen for the first
        time counts from now on."""
        now = self._clock()
        known = seconds.keys() & self._seconds.keys()
        busy = sum(seconds[engine] - self._seconds[engine] for engine in known)
        share = busy / (len(known) * (now - self._last)) if known and now > self._last else 0.0
        self._last, self._seconds = now, dict(seconds)
        return min(max(share, 0.0), 1.0)
