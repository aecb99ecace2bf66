"""The sandbox of one episode of the environment `tools`, which continues where its record ends.

It starts with the first command. If the worker was lost, the recorded results answer the commands up to that
point; the sandbox of the next worker begins with the last snapshot, and runs the recorded commands since then
again, without their answers being used.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from rollout.config import SandboxConfig
from rollout.sandboxes.base import Executed, Sandbox, SandboxCommand, Start
from rollout.sandboxes.pool import SandboxPool

log = logging.getLogger("tether.sandboxes")

Once = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Records a result under a name, such as `Episode.once`."""


class World:
    """Sandbox of one episode; closing it ends the sandbox and forgets its snapshots."""

    def __init__(self, pool: SandboxPool, config: SandboxConfig, lease_s: float, once: Once) -> None:
        self._pool, self._config, self._lease_s, self._once = pool, config, lease_s, once
        self._opened = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._snapshot, self._since = "", list[SandboxCommand]()
        """The last snapshot, and the commands that have run since."""
        self._old: list[str] = []
        """Snapshots from before it."""
        self._calls = 0
        """Commands of the episode that were answered."""

    async def __aenter__(self) -> "World":
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self._opened.aclose()
        await self._forget()
        if self._snapshot and kind is None:  # else the next attempt may begin with it
            await self._pool.forget(self._snapshot)

    async def run(self, order: SandboxCommand) -> tuple[Executed, str]:
        """Run a command; return how it ended, and the new snapshot, if this call has one.

        Raises:
            SandboxDied: the sandbox does not answer, so the episode has failed.
        """
        sandbox = await self._started()
        executed = await sandbox.exec(order)
        await self._forget()
        every = self._config.snapshot_calls
        return executed, await sandbox.snapshot() if every and (self._calls + 1) % every == 0 else ""

    def passed(self, order: SandboxCommand, snapshot: str) -> None:
        """Note that a command was answered: by `run`, or from the record, which has its snapshot."""
        self._calls += 1
        if snapshot:
            self._old += [self._snapshot] if self._snapshot else []
            self._snapshot, self._since = snapshot, []
        else:
            self._since.append(order)

    async def _forget(self) -> None:
        while self._old:
            await self._pool.forget(self._old.pop())

    async def _started(self) -> Sandbox:
        if self._sandbox is None:
            start = Start(self._lease_s, snapshot=self._snapshot)

            async def begin() -> dict[str, Any]:
                self._sandbox = await self._opened.enter_async_context(self._pool.leased(start))
                return {"sandbox": self._config.name, "commands_again": len(self._since)}

            await self._once(f"sandbox after {self._calls} calls", begin)
            if self._sandbox is None:  # the record has its start: this is another one
                await begin()
            assert self._sandbox is not None
            for order in self._since:
                await self._sandbox.exec(order)
            if self._calls:
                log.info("sandbox.continued calls=%d again=%d", self._calls, len(self._since))
        return self._sandbox
