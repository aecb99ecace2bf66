"""Double-buffers versions: engines read one set of buckets while the next version is written to the other."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocol.errors import WeightError

SETS = 2

Memory = TypeVar("Memory")


@dataclass(slots=True)
class _Set(Generic[Memory]):
    memory: Memory | None = None
    """Made when the set is taken for the first time."""
    readers: int = 0
    uses: int = 0
    """How often it was taken."""


class BufferLease(Generic[Memory]):
    """The memory of one version.

    The thread that took the set writes it; engines read it until the set is taken again.
    """

    def __init__(self, held: _Set[Memory], memory: Memory, changed: threading.Condition) -> None:
        self.memory = memory
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


class DoubleBuffer(Generic[Memory]):
    """Memory of the last two versions. No set is written to while an engine reads it."""

    def __init__(self, make: Callable[[], Memory]) -> None:
        """Keep versions in memory that `make` returns, once for each set."""
        self._make = make
        self._sets: list[_Set[Memory]] = [_Set() for _ in range(SETS)]
        self._next = 0
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> BufferLease[Memory]:
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
            if held.memory is None:
                held.memory = self._make()
            return BufferLease(held, held.memory, self._changed)

    def published(self) -> None:
        """Mark the set taken last as in use; without this call, `take` returns the same set again."""
        with self._changed:
            self._next = (self._next + 1) % SETS
