"""Runs work on large texts in threads, to keep the event loop free to extend leases.

All sessions of a process share two threads. Cancelling a caller removes its queued work, so each connection
and episode has at most one work item in the queue.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

LARGE = 8192
"""Number of characters above which text is parsed, rendered and tokenized in a thread. Shorter text takes a
few milliseconds; the round trip to a thread takes about 0.1 ms."""
TOKEN = 8
"""Characters that one token counts as."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="large-text")


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Return the result of `work`; run it in a thread if `size` exceeds `LARGE` characters.

    If the call is cancelled, work that has started runs to its end, and its result is discarded.
    """
    if size <= LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


def size_of(value: Any) -> int:
    """Return the approximate number of characters of a JSON value; stop counting above `LARGE`."""
    size, rest = 0, [value]
    while rest and size <= LARGE:
        value_inside = rest.pop()
        size += TOKEN
        if isinstance(value_inside, str | bytes):
            size += len(value_inside)
        elif isinstance(value_inside, dict | list | tuple):
            size += TOKEN * len(value_inside)
            if size <= LARGE:
                rest += _inside(value_inside)
    return size


def _inside(value: Any) -> Iterable[Any]:
    return (*value.keys(), *value.values()) if isinstance(value, dict) else value
