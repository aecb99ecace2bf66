"""Threads of an event loop, for a user's coroutines that call `asyncio.to_thread`.

A thread cannot be cancelled. A cancelled call therefore leaves its threads running, and without new threads a
few such calls would block all later ones.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

THREADS = 32
"""Threads of one executor. If half of them are stuck, a new executor replaces it."""
MAX_STUCK = 32
"""Stuck threads of replaced executors at which the process should be replaced."""
Futures = set[Future[Any]]
_futures_of_call: ContextVar[Futures] = ContextVar("futures_of_call")
_futures_of_process: Futures = set()


class _Executor(ThreadPoolExecutor):
    """An executor that keeps each future in its call's set and the process's set until the future is done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        for futures in (_futures_of_process, _futures_of_call.get(None)):
            if futures is not None:
                futures.add(future)
                future.add_done_callback(futures.discard)
        return future


class CallThreads:
    """The event loop's default executor, which is replaced when cancelled calls hold its threads."""

    def __init__(self) -> None:
        self._executor: _Executor | None = None
        self._stuck: Futures = set()
        """Futures of cancelled calls that still run in the current executor."""
        self._abandoned: Futures = set()
        """Futures of cancelled calls that still run in replaced executors."""

    def follow(self, futures: Futures) -> None:
        """Collect in `futures` the running and waiting futures of the current task's threads."""
        if self._executor is None:
            self._replace()
        _futures_of_call.set(futures)

    def abandon(self, futures: Futures) -> bool:
        """Note the running futures of a cancelled call; return whether to replace the process."""
        self._stuck = running(self._stuck | futures)
        self._abandoned = running(self._abandoned)
        if len(self._stuck) >= THREADS // 2:
            self._abandoned |= self._stuck
            self._stuck = set()
            self._replace()
        return len(self._abandoned) >= MAX_STUCK

    def _replace(self) -> None:
        self._executor = _Executor(THREADS, thread_name_prefix="call")
        asyncio.get_running_loop().set_default_executor(self._executor)


def running(futures: Futures) -> Futures:
    """Return the futures whose threads still run; the threads may end at any moment."""
    return {future for future in [*futures] if future.running()}


def running_calls() -> Futures:
    """Return the running futures of all calls. The interpreter's exit waits for their threads."""
    return running(_futures_of_process)
