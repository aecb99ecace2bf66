"""Queues coroutines that wait for each other, first come first served."""

import asyncio
import contextlib
from collections import deque


class WaitQueue:
    """First-in, first-out queue of waiting coroutines. Its length is bounded by the number of callers."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiters)

    async def wait(self) -> None:
        """Wait until woken. Cancelled after it was woken, it wakes the next one instead."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.wake_one()
            raise
        finally:
            if not waiter.done() or waiter.cancelled():
                with contextlib.suppress(ValueError):  # `wake_one` has skipped it already
                    self._waiters.remove(waiter)

    def wake_one(self) -> None:
        """Wake the coroutine that has waited longest, if there is one."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake every waiting coroutine."""
        while self._waiters:
            self.wake_one()
