"""Measures the share of time in which an engine has work."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class BusyMeter:
    """Counts the seconds in which at least one block ran and the engine was awake."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at zero; `clock` returns seconds."""
        self._clock = clock
        self._working = 0
        self._asleep = False
        self._busy_s = 0.0
        self._since = clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of the block as busy; blocks may overlap."""
        self._update_busy()
        self._working += 1
        try:
            yield
        finally:
            self._update_busy()
            self._working -= 1

    def sleep(self) -> None:
        """Stop counting until `wake`: a sleeping engine keeps its requests and runs none."""
        self._update_busy()
        self._asleep = True

    def wake(self) -> None:
        """Resume counting the time of running work."""
        self._update_busy()
        self._asleep = False

    def seconds(self) -> float:
        """Return the busy seconds so far."""
        self._update_busy()
        return self._busy_s

    def reading(self) -> dict[str, float]:
        """Return the busy seconds and the time of the reading, both in seconds, for the registry."""
        return {"busy_s": round(self.seconds(), 3), "busy_at_s": round(self._since, 3)}

    def _update_busy(self) -> None:
        now = self._clock()
        if self._working and not self._asleep:
            self._busy_s += now - self._since
        self._since = now


class BusyShare:
    """Mean busy share of engines between two readings of their meters.

    Readings arrive with heartbeats, which may be rarer than steps, and contain their time. An engine counts
    only when it has a newer reading, over the time between its two readings.
    """

    def __init__(self) -> None:
        self._readings: dict[str, tuple[float, float]] = {}
        """Engine -> its last reading: time and busy seconds, by the engine's clock."""

    def since_last(self, readings: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Return the mean share, 0 to 1, over engines with a newer reading; None if there is none.

        Args:
            readings: engine -> its registry entry, with `BusyMeter.reading`. An engine counts from its second
                reading on.
        """
        shares = []
        current: dict[str, tuple[float, float]] = {}
        for engine, info in readings.items():
            at_s, busy_s = info.get("busy_at_s"), info.get("busy_s")
            if not isinstance(at_s, (int, float)) or not isinstance(busy_s, (int, float)):
                continue
            current[engine] = (at_s, busy_s)
            before_at_s, before_s = self._readings.get(engine, current[engine])
            if at_s > before_at_s:
                shares.append(min(max((busy_s - before_s) / (at_s - before_at_s), 0.0), 1.0))
        self._readings = current
        return sum(shares) / len(shares) if shares else None
