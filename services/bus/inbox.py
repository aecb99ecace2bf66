"""Passes items from event loop callbacks to coroutines, through a bounded queue."""

import asyncio
from typing import Generic, TypeVar

from protocol.errors import Unavailable

T = TypeVar("T")


class Inbox(Generic[T]):
    """Bounded queue; `get` frees a slot.

    `put` never blocks or drops an item: the caller must check `full` first.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._items: asyncio.Queue[T | None] = asyncio.Queue()  # None marks a closed inbox

    def __len__(self) -> int:
        return self._items.qsize()

    @property
    def full(self) -> bool:
        return self._items.qsize() >= self._limit

    def put(self, item: T) -> None:
        """Add an item, even if the inbox is full."""
        self._items.put_nowait(item)

    def drop_oldest(self) -> None:
        """Remove the oldest item."""
        self._items.get_nowait()

    async def get(self) -> T:
        """Wait for an item; remove and return the oldest item. Cancelling loses no item.

        Raises:
            Unavailable: the inbox is closed.
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
