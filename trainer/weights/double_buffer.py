"""Two sets of buckets, written in turns: one is read by engines while the other gets the next version."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from protocol.errors import WeightError

SETS = 2


@dataclass(slots=True)
class _Set:
    buckets: list[torch.Tensor] = field(default_factory=list)
    readers: int = 0
    turn: int = 0
    """Which version of this set it holds, counted from 1."""


class BufferLease:
    """The memory of one version: to be written by who has taken it, then read by engines until its set is
    taken again."""

    def __init__(self, held: _Set, changed: threading.Condition, device: torch.device) -> None:
        self._set = held
        self._turn = held.turn
        self._changed = changed
        self._device = device

    def bucket(self, index: int, nbytes: int) -> torch.Tensor:
        """Bucket `index`, uint8, of at least `nbytes`: the same memory as in the set's last turn unless that
        is too small."""
        buckets = self._set.buckets
        if index == len(buckets):
            buckets.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        elif len(buckets[index]) < nbytes:
            buckets[index] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return buckets[index]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within this, nobody writes to the memory. Raises ValueError if it has been taken for another
        version."""
        with self._changed:
            if self._set.turn != self._turn:
                raise ValueError("the version was replaced before it was sent")
            self._set.readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._set.readers -= 1
                self._changed.notify_all()


class DoubleBuffer:
    """The memory of versions that engines read by themselves. No set is written to while anybody reads it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sets = [_Set() for _ in range(SETS)]
        self._next = 0
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> BufferLease:
        """The set that was written longest ago, once nobody reads it.

        Raises:
            WeightError: somebody still does after `timeout_s`.
        """
        with self._changed:
            held = self._sets[self._next]
            if not self._changed.wait_for(lambda: not held.readers, timeout_s):
                raise WeightError(
                    f"{held.readers} engine ranks still copy the version before the last after {timeout_s:g} s"
                )
            held.turn += 1
            return BufferLease(held, self._changed, self._device)

    def published(self) -> None:
        """What was taken last holds a version now: the next one goes to the other set. Else it is taken
        again."""
        with self._changed:
            self._next = (self._next + 1) % SETS
