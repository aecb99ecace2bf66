"""Coroutines that wait in line."""

import asyncio
from collections import deque


class WaitQueue:
    """A line of waiting coroutines; as long as there are callers. `wake_one` lets the first one go on."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._line)

    async def wait(self) -> None:
        """Wait for a turn. Cancelled after it was given, it gives the turn to the next one."""
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake_one()
            raise
        finally:
            if not turn.done() or turn.cancelled():
                self._leave(turn)

    def wake_one(self) -> None:
        """Let the first one in the line go on, if there is one."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def give_all(self) -> None:
        """Let everyone go on."""
        while self._line:
            self.wake_one()

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if turn in self._line:
            self._line.remove(turn)
