"""Decides whether an engine drafts, by the measured tokens per second with and without drafts.

Drafts are cheap while few requests run, because a step is then memory-bound. They cost more than they gain
when the batch saturates the device or drafts are rejected. Both rates are measured for each batch size.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

BLOCK = 16
"""Steps per measurement; all use the same mode."""
TRIAL_EVERY = 16
"""Every `TRIAL_EVERY` blocks, the slower mode is measured again."""
SMOOTHING = 0.3
"""Weight of the latest block in the moving average of a mode's rate."""


@dataclass(slots=True)
class _Batch:
    """Rates of batches of similar size."""

    rates: dict[bool, float] = field(default_factory=dict)
    """Whether drafting was on -> tokens per second."""
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
    """Drafting decision of one engine, queried at each step."""

    def __init__(self, clock: Callable[[], float] = perf_counter, *, skipped: int = 1) -> None:
        """Start measuring with `clock`, in seconds.

        The first `skipped` steps of a block are ignored: they still verify drafts of the previous block, or
        include a wait for requests.
        """
        self._clock, self._skipped = clock, skipped
        self._batches: defaultdict[int, _Batch] = defaultdict(_Batch)
        self._size = -1
        self._drafts = True
        self._last = clock()
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def drafts(self, running: int, tokens: int) -> bool:
        """Return whether to draft in the next step.

        Args:
            running: number of requests in the step that just ended.
            tokens: number of tokens that the step produced.
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
