"""Double-buffers versions: engines read one set of buckets while the next version is written to the other."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from protocol.errors import WeightError

SETS = 2

Memory = TypeVar("Memory")


class BufferLease(Generic[Memory]):
    """Memory of one version.

    The thread that called `take` writes the memory. Engines read the memory until it is taken for another
    version.
    """

    def __init__(self, memory: Memory, changed: threading.Condition) -> None:
        self.memory = memory
        self.readers = 0
        self.is_replaced = False
        self._changed = changed

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the memory from being overwritten within the block.

        Raises:
            ValueError: the memory was taken for another version.
        """
        with self._changed:
            if self.is_replaced:
                raise ValueError("the version was replaced before it was sent")
            self.readers += 1
        try:
            yield
        finally:
            with self._changed:
                self.readers -= 1
                self._changed.notify_all()


class DoubleBuffer(Generic[Memory]):
    """Memory of the last two versions, which is not overwritten while an engine reads it."""

    def __init__(self, make: Callable[[], Memory]) -> None:
        """Create the buffer; `make` allocates the memory of a version, and is called twice."""
        self._make = make
        self._leases: list[BufferLease[Memory] | None] = [None] * SETS
        self._next = 0
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> BufferLease[Memory]:
        """Take the memory of the older version once it has no readers.

        Raises:
            WeightError: the memory has readers after `timeout_s`.
            WeightError, OutOfMemoryError: the memory cannot be allocated.
        """
        with self._changed:
            before = self._leases[self._next]
            if before is not None and not self._changed.wait_for(lambda: not before.readers, timeout_s):
                raise WeightError(
                    f"{before.readers} engine ranks still copy the version before the last "
                    f"after {timeout_s:g} s"
                )
            if before is not None:
                before.is_replaced = True
            memory = self._make() if before is None else before.memory
            lease = self._leases[self._next] = BufferLease(memory, self._changed)
            return lease

    def published(self) -> None:
        """Mark the last taken memory as current; without this call, `take` returns the same memory again."""
        with self._changed:
            self._next = (self._next + 1) % SETS
