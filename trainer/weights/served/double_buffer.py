"""Double-buffers versions: engines read one set of buckets while the next version is written to the other."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from protocol.errors import WeightError

SETS = 2

Allocate = Callable[[int], torch.Tensor]
"""Returns a new bucket of so many bytes, uint8."""


@dataclass(slots=True)
class _Set:
    buckets: tuple[torch.Tensor, ...] = ()
    """Allocated when it is taken for the first time."""
    readers: int = 0
    uses: int = 0
    """How often it was taken."""


class BufferLease:
    """The buckets of one version.

    The thread that took the set writes them; engines read them until the set is taken again.
    """

    def __init__(self, held: _Set, changed: threading.Condition) -> None:
        self.buckets = held.buckets
        self._set = held
        self._use = held.uses
        self._changed = changed

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the memory from being written within the block.

        Raises:
            ValueError: the set was taken for another version.
        """
        with self._changed:
            if self._set.uses != self._use:
                raise ValueError("the version was replaced before it was sent")
            self._set.readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._set.readers -= 1
                self._changed.notify_all()


class DoubleBuffer:
    """Memory of the last two versions. No set is written to while an engine reads it."""

    def __init__(self, allocate: Allocate, sizes: Sequence[int]) -> None:
        """Make versions of buckets of these sizes, when they are taken."""
        self._allocate = allocate
        self._sizes = sizes
        self._sets = [_Set() for _ in range(SETS)]
        self._next = 0
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> BufferLease:
        """Take the set that was written least recently, once it has no reader.

        Raises:
            WeightError: it is still read after `timeout_s`.
            WeightError, OutOfMemoryError: there is no memory for it.
        """
        with self._changed:
            held = self._sets[self._next]
            if not self._changed.wait_for(lambda: not held.readers, timeout_s):
                raise WeightError(
                    f"{held.readers} engine ranks still copy the version before the last "
                    f"after {timeout_s:g} s"
                )
            held.uses += 1
            held.buckets = held.buckets or tuple(self._allocate(nbytes) for nbytes in self._sizes)
            return BufferLease(held, self._changed)

    def published(self) -> None:
        """Mark the set taken last as in use; without this call, `take` returns the same set again."""
        with self._changed:
            self._next = (self._next + 1) % SETS
