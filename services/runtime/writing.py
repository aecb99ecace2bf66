"""Writes to the run directory: repeatedly while its disk is full, which every process shows that waits."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from protocol.errors import SpoolError, TetherError
from protocol.host.full_disk import describe_full, is_for_want_of_room
from services.observability.service_rows import ROOM
from services.runtime.process import Process

log = logging.getLogger("tether")
T = TypeVar("T")

RETRY_S = 1.0
"""Seconds between two attempts."""


class StoppedWaiting(TetherError):
    """The process is to stop, and there was no room for what it was to write until then."""


async def _unchecked() -> None:
    pass


async def until_written(
    process: Process, write: Callable[[], T], check: Callable[[], Awaitable[None]] = _unchecked
) -> T:
    """Do blocking work that writes to the run directory, repeatedly while the disk or the spool refuses it.

    Messages that depend on it are not acknowledged meanwhile, so senders keep them. Cancelled, it leaves an
    attempt to its end.

    Args:
        process: shows the wait.
        write: has no effect if it raises, or may be repeated.
        check: awaited before each attempt but the first; raises if there is to be none.

    Returns:
        The result of `write`.

    Raises:
        StoppedWaiting: the process is to stop.
        Exception: the error of `check`, or of `write`, unless it is a full disk or a SpoolError.
    """
    return await _repeated(
        process, partial(asyncio.to_thread, write), lambda _: process.settings.run_dir, check, _is_waited_for
    )


async def until_room(
    process: Process,
    work: Callable[[], Awaitable[T]],
    place_of: Callable[[Exception], Path | str],
    check: Callable[[], Awaitable[None]],
) -> T:
    """Do work that writes to a disk, repeatedly while that is full, until the process is to stop.

    Args:
        process: shows the wait.
        work: has no effect if it raises.
        place_of: returns a directory on the disk, which a person has to make room on, from the error.
        check: as in `until_written`.

    Returns:
        The result of `work`.

    Raises:
        StoppedWaiting: the process is to stop.
        Exception: the error of `check`, or of `work`, unless it is a full disk.
    """
    return await _repeated(process, work, place_of, check, is_for_want_of_room)


async def _repeated(
    process: Process,
    work: Callable[[], Awaitable[T]],
    place_of: Callable[[Exception], Path | str],
    check: Callable[[], Awaitable[None]],
    is_waited_for: Callable[[Exception], bool],
) -> T:
    try:
        return await work()
    except Exception as error:
        if not is_waited_for(error):
            raise
        refused = error
    async with waiting_for_room(process, refused, place_of(refused)):
        while not await process.stopped_within(RETRY_S):
            await check()
            try:
                return await work()
            except Exception as error:
                if not is_waited_for(error):
                    raise
        raise StoppedWaiting(str(refused)) from refused


@contextlib.asynccontextmanager
async def waiting_for_room(
    process: Process, error: BaseException, place: Path | str | None = None
) -> AsyncIterator[None]:
    """Show that the process waits because a write was refused, at once and until the block ends.

    Args:
        process: it.
        error: of the write.
        place: a directory on the disk, or its URL; None: the run directory.
    """
    process.metrics.count("writes.refused")
    log.error("write.refused error=%s", error)
    is_full = is_for_want_of_room(error)
    what = f"{ROOM}: {describe_full(place or process.settings.run_dir)}" if is_full else "the spool"
    with process.waiting(what):
        with contextlib.suppress(TetherError, TimeoutError):  # the ledger may be on the same disk
            async with asyncio.timeout(RETRY_S):
                await process.register()
        yield
    log.info("write.continues")


def _is_waited_for(error: BaseException) -> bool:
    return isinstance(error, SpoolError) or is_for_want_of_room(error)
