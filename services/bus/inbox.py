"""A bounded queue between the event loop's callbacks and the coroutine that reads from it."""

from collections import deque
from typing import Generic, TypeVar

from protocol.errors import Unavailable
from services.bus.wait_queue import WaitQueue

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items wait here for `get`, which frees their slot. Who puts decides what to do when it is `full`."""

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
        """Make room: take the oldest item out."""
        return self._items.popleft()

    async def get(self) -> T:
        """The oldest item. Cancelled, it leaves every item where it is.

        Raises:
            Unavailable: if the inbox was closed.
        """
        while not self._items:
            if self._closed:
                raise Unavailable(f"{self._name} is closed")
            await self._readers.wait()
        return self._items.popleft()

    def close(self) -> None:
        """Drop what waits; readers get `Unavailable`."""
        self._closed = True
        self._items.clear()
        self._readers.give_all()
