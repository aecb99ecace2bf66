"""Leases sandboxes to episodes: a limited number starts concurrently, and each ends with its episode."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from rollout.abandoned_tasks import wait_shielded
from rollout.sandboxes.base import Provider, Sandbox, Start

log = logging.getLogger("tether.sandboxes")

T = TypeVar("T")

CREATE_S = 60
"""Timeout of creating a container or machine, seconds."""
STOP_S = 60.0
"""Timeout of stopping a sandbox, seconds; after it, the lease or the next worker's start removes the sandbox.
"""


class SandboxPool:
    """Sandboxes of one rollout worker."""

    def __init__(self, provider: Provider, starts: int) -> None:
        """Args: provider: starts sandboxes; starts: maximum concurrent starts, further ones wait in order."""
        self._provider = provider
        self._starting = asyncio.Semaphore(starts)
        self._clearing = asyncio.Lock()
        self._cleared = False
        self.running = 0
        """Number of leased sandboxes."""

    @asynccontextmanager
    async def leased(self, start: Start) -> AsyncIterator[Sandbox]:
        """Provide a sandbox in the block; it is stopped afterwards, even after a cancellation.

        A cancelled start leaves the queue. The first start removes sandboxes of dead workers.

        Raises:
            SandboxDied: the sandbox did not start.
            SettingsError: the sandbox cannot start as configured.
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
            await complete_stop(sandbox.stop())

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot that is no longer needed."""
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


async def create_or_remove(
    creation: Awaitable[T], remove: Callable[[T], Awaitable[None]], failures: tuple[type[Exception], ...]
) -> T:
    """Return the result of `creation`. If cancelled, wait for the result and remove it.

    Args:
        creation: creates the result; cannot be interrupted.
        failures: exceptions that mean that there is no result.
    """
    task = asyncio.ensure_future(creation)  # noqa: TID251  no task group: it must survive cancellation

    async def remove_result() -> None:
        with suppress(*failures):
            await remove(await task)

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await complete_stop(remove_result(), CREATE_S + STOP_S)
        raise


async def complete_stop(stopping: Awaitable[None], within_s: float = STOP_S) -> None:
    """Wait for a stop even if the caller is cancelled meanwhile; log a failure."""
    task = asyncio.ensure_future(stopping)  # noqa: TID251  no task group: it must survive cancellation
    cancelled = await wait_shielded(task, within_s)
    if not task.done():
        task.cancel()
        log.error("sandbox.not_stopped after_s=%g", within_s)
    elif not task.cancelled() and (failure := task.exception()) is not None:
        log.error("sandbox.not_stopped why=%r", str(failure)[:300])
    if cancelled is not None:
        raise cancelled
