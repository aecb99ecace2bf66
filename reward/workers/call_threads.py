"""Threads of a worker's event loop, for calls that use `asyncio.to_thread`.

A thread cannot be cancelled. A late call therefore leaves its threads running, and without new threads a few
such calls would make all later ones late.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

THREADS = 16
"""Threads of one executor. Half of them may be stuck before a new executor takes its place."""
MAX_STUCK = 128
"""Stuck threads at which the process should be replaced."""
Futures = set[Future[Any]]
_futures_of_call: ContextVar[Futures] = ContextVar("futures_of_call")


class _Executor(ThreadPoolExecutor):
    """An executor that adds each future to its call's set until the future is done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        if (futures := _futures_of_call.get(None)) is not None:
            futures.add(future)
            future.add_done_callback(futures.discard)
        return future


class CallThreads:
    """The default executor of the running event loop, which is replaced when late calls hold its threads."""

    def __init__(self) -> None:
        self._stuck: Futures = set()
        """Futures of late calls that still run in the current executor."""
        self._abandoned: Futures = set()
        """Futures of late calls that still run in earlier executors."""
        self._renew()

    def follow(self, futures: Futures) -> None:
        """Add the futures of the current task's threads to `futures`, and remove each when it is done."""
        _futures_of_call.set(futures)

    def abandon(self, futures: Futures) -> bool:
        """Note the threads that a late call leaves behind; return whether the process should be replaced."""
        self._stuck = {future for future in self._stuck | futures if future.running()}
        self._abandoned = {future for future in self._abandoned if future.running()}
        if len(self._stuck) >= THREADS // 2:
            self._abandoned |= self._stuck
            self._stuck = set()
            self._renew()
        return len(self._abandoned) >= MAX_STUCK

    def _renew(self) -> None:
        executor = _Executor(THREADS, thread_name_prefix="call")
        asyncio.get_running_loop().set_default_executor(executor)
