"""Runs user coroutines, and abandons a coroutine or a thread that does not end when it is cancelled.

A coroutine that swallows its cancellation would block its worker forever, and a thread cannot be cancelled.
Only the end of the process ends such coroutines and threads, so their number is limited.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from protocol.errors import TetherError
from protocol.host.call_threads import CallThreads, Futures, running

log = logging.getLogger("tether.strays")
T = TypeVar("T")

GRACE_S = 5.0
"""Seconds between the cancellation of a coroutine and its abandonment."""
MAX_ABANDONED = 64
"""Number of abandoned coroutines and threads at which the process starts no new coroutine."""


class AbandonedTasks:
    """Abandoned coroutines of a process, and abandoned threads that coroutines waited for."""

    def __init__(self, grace_s: float = GRACE_S, max_abandoned: int = MAX_ABANDONED) -> None:
        self._grace_s, self._max_abandoned = grace_s, max_abandoned
        self._threads = CallThreads()
        self._running: set[asyncio.Task[Any]] = set()
        self._abandoned_count = 0

    def counts(self) -> dict[str, int]:
        """Return how many coroutines and threads were abandoned, and how many of them have ended since."""
        return {"left": self._abandoned_count, "ended": self._abandoned_count - len(self._running)}

    def check(self) -> None:
        """Check that the process may start another coroutine.

        Raises:
            TetherError: too many coroutines or threads are abandoned; the message names an example.
        """
        if len(self._running) >= self._max_abandoned:
            name = next(iter(self._running)).get_name()
            raise TetherError(
                f"{len(self._running)} episodes run on {self._grace_s:g} s after their cancellation, such as "
                f"{name}: restart the worker to end them, and let the environment, or what it calls, end "
                "when it gets CancelledError"
            )

    async def run(
        self,
        make_coroutine: Callable[[], Awaitable[T]],
        name: str,
        on_abandoned: Callable[[], None] = lambda: None,
    ) -> T:
        """Return a coroutine's result, or raise its exception.

        Cancelling the call cancels the coroutine and waits up to `grace_s` for its end. A coroutine that is
        still running then is abandoned, and its outcome is ignored. So are its threads.

        Args:
            make_coroutine: returns the coroutine, which runs in its own task.
            name: task name, for the log.
            on_abandoned: callback when the coroutine is abandoned.
        """
        futures = Futures()

        async def followed() -> T:
            self._threads.follow(futures)
            return await make_coroutine()

        # no task group: the task may outlive its caller
        task = asyncio.get_running_loop().create_task(result_or_exception(followed), name=name)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await wait_shielded(task, self._grace_s)
            if not task.done():
                self._abandon(task)
                on_abandoned()
            self._abandon_threads(futures, name)
            raise
        outcome = task.result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        self._abandoned_count += 1
        log.warning(
            "episode.stray task=%s grace_s=%g strays=%d", task.get_name(), self._grace_s, len(self._running)
        )
        task.add_done_callback(self._forget_ended)

    def _abandon_threads(self, futures: Futures, name: str) -> None:
        for future in running(futures):
            waiting = result_or_exception(partial(asyncio.wrap_future, future))
            self._abandon(asyncio.get_running_loop().create_task(waiting, name=f"{name}-thread"))
        self._threads.abandon(futures)

    def _forget_ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():  # by the end of the event loop; a thread runs on
            return
        log.info("episode.stray_ended task=%s strays=%d", task.get_name(), len(self._running))


async def result_or_exception(make_coroutine: Callable[[], Awaitable[T]]) -> T | BaseException:
    """Return a coroutine's result or exception: SystemExit in a task would end the event loop."""
    try:
        return await make_coroutine()
    except (Exception, BaseExceptionGroup, SystemExit) as error:
        return error


async def wait_shielded(task: "asyncio.Future[Any]", seconds: float) -> asyncio.CancelledError | None:
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
