"""Queues items between callbacks of the event loop and the coroutines that read them, up to a limit."""

import asyncio
from typing import Generic, TypeVar

from protocol.errors import Unavailable

T = TypeVar("T")


class Inbox(Generic[T]):
    """Bounded queue; `get` frees a slot.

    `put` never blocks and never drops: the caller checks `full` and decides what to do about it.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._items: asyncio.Queue[T | None] = asyncio.Queue()  # None: closed, and it stays the only item

    def __len__(self) -> int:
        return self._items.qsize()

    @property
    def full(self) -> bool:
        return self._items.qsize() >= self._limit

    def put(self, item: T) -> None:
        """Add an item, even to a full inbox."""
        self._items.put_nowait(item)

    def drop_oldest(self) -> None:
        """Remove the oldest item."""
        self._items.get_nowait()

    async def get(self) -> T:
        """Wait for an item; remove and return the oldest. Cancelled, it leaves every item in place.

        Raises:
            Unavailable: if the inbox was closed.
        """
        item = await self._items.get()
        if item is None:
            self._items.put_nowait(None)
            raise Unavailable(f"{self._name} is closed")
        return item

    def close(self) -> None:
        """Drop all items; waiting and later readers get `Unavailable`."""
        while not self._items.empty():
            self._items.get_nowait()
        self._items.put_nowait(None)
