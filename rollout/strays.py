"""Runs users' coroutines, and leaves one behind that does not end when it is cancelled.

A coroutine that catches its cancellation would otherwise keep its place in the worker for as long as it
likes. Only the end of its process ends it, so the number of such coroutines is limited.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from protocol.errors import TetherError

log = logging.getLogger("tether.strays")
T = TypeVar("T")

GRACE_S = 5.0
"""Seconds that a cancelled coroutine has to close what it opened and end."""
MOST = 64
"""Number of coroutines left behind at which a process begins no new one."""


class Strays:
    """The coroutines that a process has left behind."""

    def __init__(self, grace_s: float = GRACE_S, most: int = MOST) -> None:
        self._grace_s, self._most = grace_s, most
        self._left: set[asyncio.Task[Any]] = set()
        self._total = 0

    def counts(self) -> dict[str, int]:
        """Return how many were left behind, and how many of them have ended since."""
        return {"left": self._total, "ended": self._total - len(self._left)}

    def check(self) -> None:
        """Check that the process may begin something new.

        Raises:
            TetherError: too many coroutines are left behind; names one.
        """
        if len(self._left) >= self._most:
            name = next(iter(self._left)).get_name()
            raise TetherError(
                f"{len(self._left)} episodes run on {self._grace_s:g} s after their cancellation, such as "
                f"{name}, and only a new process is rid of them: let the environment, or what it calls, end "
                "when it gets CancelledError"
            )

    async def run(
        self, begin: Callable[[], Awaitable[T]], name: str, on_left: Callable[[], None] = lambda: None
    ) -> T:
        """Return a coroutine's result, or raise its exception.

        Cancelling the call cancels the coroutine and waits for its end, `grace_s` at most. One that runs on
        is left behind, and its outcome is ignored.

        Args:
            begin: returns the coroutine, which gets a task of its own.
            name: of the task, in the log.
            on_left: called if it is left behind.
        """
        # in no group: it may outlive its caller
        task = asyncio.get_running_loop().create_task(caught(begin), name=name)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await waited(task, self._grace_s)
            if not task.done():
                self._leave(task)
                on_left()
            raise
        outcome = task.result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._left.add(task)
        self._total += 1
        log.warning(
            "episode.stray task=%s grace_s=%g strays=%d", task.get_name(), self._grace_s, len(self._left)
        )
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        log.info("episode.stray_ended task=%s strays=%d", task.get_name(), len(self._left))


async def caught(begin: Callable[[], Awaitable[T]]) -> T | BaseException:
    """Return a coroutine's result or exception: in a task SystemExit would end the event loop."""
    try:
        return await begin()
    except (Exception, BaseExceptionGroup, SystemExit) as error:
        return error


async def waited(task: "asyncio.Future[Any]", seconds: float) -> asyncio.CancelledError | None:
    """Wait for the end of a task, `seconds` at most.

    Returns: the cancellation of the caller, if there was one, which does not shorten the wait.
    """
    cancelled: asyncio.CancelledError | None = None
    clock = asyncio.get_running_loop().time
    until = clock() + seconds
    while not task.done() and (left_s := until - clock()) > 0:
        try:
            await asyncio.wait([task], timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
