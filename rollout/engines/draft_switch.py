"""Chooses whether an engine drafts: by the tokens per second that its steps gave with and without drafts.

A draft costs little while few requests run, because a step then waits for memory, and more than it gains when
the batch keeps the device busy or drafts are refused. Both are measured, for each size of the batch.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

BLOCK = 16
"""Steps that are made in one way, and compared with others as a whole."""
TRIAL_EVERY = 16
"""Every so many blocks the way that is slower by then is tried again."""
SMOOTHING = 0.3
"""Weight of the last block in a way's rate."""


@dataclass(slots=True)
class _Batch:
    """Rates of batches of about one size."""

    rates: dict[bool, float] = field(default_factory=dict)
    """Whether drafts were made -> tokens per second."""
    blocks: int = 0

    def add(self, drafts: bool, rate: float) -> None:
        before = self.rates.get(drafts, rate)
        self.rates[drafts] = before + SMOOTHING * (rate - before)
        self.blocks += 1

    def choose(self) -> bool:
        """Return whether the next block drafts."""
        for drafts in (True, False):
            if drafts not in self.rates:
                return drafts
        is_better = self.rates[True] >= self.rates[False]
        return is_better != (self.blocks % TRIAL_EVERY == 0)


class DraftSwitch:
    """The choice of one engine, asked at each step."""

    def __init__(self, clock: Callable[[], float] = perf_counter, *, skipped: int = 1) -> None:
        """Begin to measure by `clock`, in seconds.

        The first `skipped` steps of a block are left out: they have the drafts of the block before, and a
        wait for requests is no typical step.
        """
        self._clock, self._skipped = clock, skipped
        self._batches: defaultdict[int, _Batch] = defaultdict(_Batch)
        self._size = -1
        self._drafts = True
        self._last = clock()
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def drafts(self, running: int, tokens: int) -> bool:
        """Return whether to draft for the next step.

        Args:
            running: requests of the step that has ended.
            tokens: tokens that it gave.
        """
        now = self._clock()
        self._seconds.append(now - self._last)
        self._tokens.append(tokens)
        self._last = now
        size = running.bit_length()
        if size != self._size:
            self._begin(size)
        elif len(self._seconds) >= BLOCK + self._skipped:
            seconds, given = self._seconds[self._skipped :], self._tokens[self._skipped :]
            rate = sum(given) / (BLOCK * max(median(seconds), 1e-9))
            self._batches[size].add(self._drafts, rate)
            self._begin(size)
        return self._drafts

    def _begin(self, size: int) -> None:
        self._size, self._drafts = size, self._batches[size].choose()
        self._seconds, self._tokens = [], []
