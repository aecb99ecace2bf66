"""Judges by counters that hosts raise which of them have fallen silent."""

from collections.abc import Iterable


class Beats:
    """The counters of other hosts, and when each of them was last seen to rise."""

    def __init__(self, numbers: Iterable[int], limit_s: float, now: float) -> None:
        """Expect a sign of life from every host of `numbers` within `limit_s` of `now`, seconds."""
        self._limit_s = limit_s
        self._seen = dict.fromkeys(numbers, (-1, now))

    @property
    def numbers(self) -> list[int]:
        """Hosts that are expected to beat."""
        return list(self._seen)

    def note(self, number: int, count: int, now: float) -> None:
        """Note a host's counter as it was at `now`."""
        if count != self._seen[number][0]:
            self._seen[number] = (count, now)

    def silent(self, now: float) -> list[int]:
        """Return the hosts whose counter has not risen for longer than the limit."""
        return [number for number, (_, since) in self._seen.items() if now - since > self._limit_s]
