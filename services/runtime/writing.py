"""Retries writes to the run directory while its disk is full, and shows the wait."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from protocol.errors import SpoolError, TetherError
from protocol.host.full_disk import describe_full, is_disk_full_error
from services.observability.service_rows import ROOM
from services.runtime.process import Process

log = logging.getLogger("tether")
T = TypeVar("T")

RETRY_S = 1.0
"""Seconds between two attempts."""


class StoppedWaiting(TetherError):
    """The process is to stop while a write still lacks room."""


async def _unchecked() -> None:
    pass


async def retry_until_written(
    process: Process, write: Callable[[], T], check: Callable[[], Awaitable[None]] = _unchecked
) -> T:
    """Run a blocking write to the run directory; retry while the disk is full or the spool fails.

    Messages that depend on the write stay unacknowledged, so senders keep them. If cancelled, an attempt in
    progress is completed.

    Args:
        process: shows the wait.
        write: must have no effect if it raises, or be repeatable.
        check: awaited before each retry; raises to end the retries.

    Returns:
        The result of `write`.

    Raises:
        StoppedWaiting: the process is to stop.
        Exception: the error of `check`, or an error of `write` other than a full disk or a SpoolError.
    """
    return await _retry(
        process, partial(asyncio.to_thread, write), lambda _: process.settings.run_dir, check, _is_waited_for
    )


async def retry_while_full(
    process: Process,
    work: Callable[[], Awaitable[T]],
    find_full_disk: Callable[[Exception], Path | str],
    check: Callable[[], Awaitable[None]],
) -> T:
    """Run work that writes to a disk; retry while the disk is full, until the process is to stop.

    Args:
        process: shows the wait.
        work: must have no effect if it raises.
        find_full_disk: maps the error to a directory on the full disk, where the user must free space.
        check: as in `retry_until_written`.

    Returns:
        The result of `work`.

    Raises:
        StoppedWaiting: the process is to stop.
        Exception: the error of `check`, or an error of `work` other than a full disk.
    """
    return await _retry(process, work, find_full_disk, check, is_disk_full_error)


async def _retry(
    process: Process,
    work: Callable[[], Awaitable[T]],
    find_full_disk: Callable[[Exception], Path | str],
    check: Callable[[], Awaitable[None]],
    is_waited_for: Callable[[Exception], bool],
) -> T:
    try:
        return await work()
    except Exception as error:
        if not is_waited_for(error):
            raise
        first_error = error
    async with waiting_for_room(process, first_error, find_full_disk(first_error)):
        while not await process.stopped_within(RETRY_S):
            await check()
            try:
                return await work()
            except Exception as error:
                if not is_waited_for(error):
                    raise
        raise StoppedWaiting(str(first_error)) from first_error


@contextlib.asynccontextmanager
async def waiting_for_room(
    process: Process, error: BaseException, place: Path | str | None = None
) -> AsyncIterator[None]:
    """Show during the block that the process waits because a write was refused.

    Args:
        process: process that waits.
        error: error of the write.
        place: directory on the disk, or URL; None: the run directory.
    """
    process.metrics.count("writes.refused")
    log.error("write.refused error=%s", error)
    is_full = is_disk_full_error(error)
    what = f"{ROOM}: {describe_full(place or process.settings.run_dir)}" if is_full else "the spool"
    with process.waiting(what):
        with contextlib.suppress(TetherError, TimeoutError):  # the ledger may be on the same disk
            async with asyncio.timeout(RETRY_S):
                await process.register()
        yield
    log.info("write.continues")


def _is_waited_for(error: BaseException) -> bool:
    return isinstance(error, SpoolError) or is_disk_full_error(error)
