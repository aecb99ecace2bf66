"""Runs the work of large texts in threads, so that the event loop extends leases meanwhile.

Two threads do it for all sessions of a process. Waiting work is dropped with its caller, so at most one for
each connection and episode waits.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

LARGE = 8192
"""Characters of text; longer text is parsed, rendered and tokenized in a thread. Less takes some
milliseconds, and the way to a thread and back takes a tenth of one."""
TOKEN = 8
"""Characters that count for a token."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="large-text")


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Return the result of `work`, run in a thread if it is about more than `LARGE` characters.

    Cancelled, work that has begun runs to its end, and its result is lost.

    Raises:
        Exception: any exception of `work`.
    """
    if size <= LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


def size_of(value: Any) -> int:
    """Return how many characters a JSON value has, roughly; some number over `LARGE` if there are more."""
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
