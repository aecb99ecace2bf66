"""Runs user coroutines, and abandons a coroutine that does not end when it is cancelled.

A coroutine that swallows its cancellation would block its worker forever. Only the end of the process ends
such a coroutine, so their number is limited.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from protocol.errors import TetherError

log = logging.getLogger("tether.strays")
T = TypeVar("T")

GRACE_S = 5.0
"""Seconds between the cancellation of a coroutine and its abandonment."""
MOST = 64
"""Number of abandoned coroutines at which the process starts no new coroutine."""


class Strays:
    """Abandoned coroutines of a process."""

    def __init__(self, grace_s: float = GRACE_S, most: int = MOST) -> None:
        self._grace_s, self._most = grace_s, most
        self._left: set[asyncio.Task[Any]] = set()
        self._total = 0

    def counts(self) -> dict[str, int]:
        """Return the number of abandoned coroutines, and the number of them that have ended since."""
        return {"left": self._total, "ended": self._total - len(self._left)}

    def check(self) -> None:
        """Check that the process may start another coroutine.

        Raises:
            TetherError: too many coroutines are abandoned; the message names an example.
        """
        if len(self._left) >= self._most:
            name = next(iter(self._left)).get_name()
            raise TetherError(
                f"{len(self._left)} episodes run on {self._grace_s:g} s after their cancellation, such as "
                f"{name}: restart the worker to end them, and let the environment, or what it calls, end "
                "when it gets CancelledError"
            )

    async def run(
        self, begin: Callable[[], Awaitable[T]], name: str, on_left: Callable[[], None] = lambda: None
    ) -> T:
        """Return a coroutine's result, or raise its exception.

        Cancelling the call cancels the coroutine and waits up to `grace_s` for its end. A coroutine that is
        still running then is abandoned, and its outcome is ignored.

        Args:
            begin: returns the coroutine, which runs in its own task.
            name: task name, for the log.
            on_left: callback when the coroutine is abandoned.
        """
        # no task group: the task may outlive its caller
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
    """Return a coroutine's result or exception: SystemExit in a task would end the event loop."""
    try:
        return await begin()
    except (Exception, BaseExceptionGroup, SystemExit) as error:
        return error


async def waited(task: "asyncio.Future[Any]", seconds: float) -> asyncio.CancelledError | None:
    """Wait at most `seconds` for the end of a task.

    Cancelling the caller does not shorten the wait. Returns: the caller's cancellation, for the caller to
    raise; None if the caller was not cancelled.
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
