"""Leases sandboxes to episodes: a bounded number starts at once, and each ends with its episode."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from rollout.sandboxes.base import Provider, Sandbox, Start
from rollout.strays import waited

log = logging.getLogger("tether.sandboxes")

T = TypeVar("T")

CREATE_S = 60
"""Seconds for a call that creates a container or a machine."""
STOP_S = 60.0
"""Seconds for a sandbox to stop; one that takes longer is left to its lease and the next worker's start."""


class SandboxPool:
    """The sandboxes of one rollout worker."""

    def __init__(self, provider: Provider, starts: int) -> None:
        """Args: provider: starts them; starts: how many start at once, others wait in their order."""
        self._provider = provider
        self._starting = asyncio.Semaphore(starts)
        self._clearing = asyncio.Lock()
        self._cleared = False
        self.running = 0
        """Sandboxes that are leased now."""

    @asynccontextmanager
    async def leased(self, start: Start) -> AsyncIterator[Sandbox]:
        """Have a sandbox within the block; cancelled or not, it is stopped behind it.

        A start that waits for its turn leaves the queue when it is cancelled. The first one removes what
        workers that have died left behind.

        Raises:
            SandboxDied: it did not start.
            SettingsError: it cannot start, as configured.
        """
        await self._clear()
        async with self._starting:
            began = time.monotonic()
            sandbox = await self._provider.start(start)
            log.debug("sandbox.started start_s=%.3f running=%d", time.monotonic() - began, self.running)
        self.running += 1
        try:
            yield sandbox
        finally:
            self.running -= 1
            await completed(sandbox.stop())

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot that no episode needs any more."""
        await self._provider.forget(snapshot)

    async def close(self) -> None:
        """Close connections to a service; sandboxes end with their episodes."""
        await self._provider.close()

    async def _clear(self) -> None:
        async with self._clearing:
            if not self._cleared:
                if left := await self._provider.clear_left():
                    log.warning("sandbox.left removed=%d", left)
                self._cleared = True


async def created(
    making: Awaitable[T], remove: Callable[[T], Awaitable[None]], failed: tuple[type[Exception], ...]
) -> T:
    """Return the result of `making`; cancelled, wait for it, as it cannot be stopped, and remove it.

    Args:
        making: makes it.
        remove: removes it.
        failed: errors with which there is none.
    """
    task = asyncio.ensure_future(making)  # noqa: TID251  in no group: it has to outlive a cancellation

    async def undone() -> None:
        with suppress(*failed):
            await remove(await task)

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await completed(undone(), CREATE_S + STOP_S)
        raise


async def completed(stopping: Awaitable[None], within_s: float = STOP_S) -> None:
    """Wait for a stop, also if the caller is cancelled meanwhile; log its failure."""
    task = asyncio.ensure_future(stopping)  # noqa: TID251  in no group: it has to outlive a cancellation
    cancelled = await waited(task, within_s)
    if not task.done():
        task.cancel()
        log.error("sandbox.not_stopped after_s=%g", within_s)
    elif not task.cancelled() and (failure := task.exception()) is not None:
        log.error("sandbox.not_stopped why=%r", str(failure)[:300])
    if cancelled is not None:
        raise cancelled
