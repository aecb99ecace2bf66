"""Queues items between callbacks of the event loop and the coroutines that read them, up to a limit."""

from collections import deque
from typing import Generic, TypeVar

from protocol.errors import Unavailable
from services.bus.wait_queue import WaitQueue

T = TypeVar("T")


class Inbox(Generic[T]):
    """Bounded queue; `get` frees a slot.

    `put` never blocks and never drops: the caller checks `full` and decides what to do about it.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._items: deque[T] = deque()
        self._readers = WaitQueue()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        return len(self._items) >= self._limit

    def put(self, item: T) -> None:
        """Add an item, even to a full inbox."""
        self._items.append(item)
        if self._readers:
            self._readers.wake_one()

    def drop_oldest(self) -> T:
        """Remove and return the oldest item."""
        return self._items.popleft()

    async def get(self) -> T:
        """Wait for an item; remove and return the oldest. Cancelled, it leaves every item in place.

        Raises:
            Unavailable: if the inbox was closed.
        """
        while not self._items:
            if self._closed:
                raise Unavailable(f"{self._name} is closed")
            await self._readers.wait()
        return self._items.popleft()

    def close(self) -> None:
        """Drop all items; waiting and later readers get `Unavailable`."""
        self._closed = True
        self._items.clear()
        self._readers.wake_all()
