"""Defines the sandbox of one episode of the environment `tools`, which resumes at the end of its record.

The sandbox starts with the first command. After a worker was lost, recorded results answer the repeated
commands. The next worker's sandbox starts from the last snapshot, and runs the commands recorded since then
again; their results are ignored.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from rollout.config import SandboxConfig
from rollout.sandboxes.base import Executed, Sandbox, SandboxCommand, Start
from rollout.sandboxes.pool import SandboxPool

log = logging.getLogger("tether.sandboxes")

RecordResult = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Records a result under a name, such as `Episode.once`."""


class EpisodeSandbox:
    """Sandbox of one episode; closing it ends the sandbox and removes its snapshots."""

    def __init__(
        self, pool: SandboxPool, config: SandboxConfig, lease_s: float, record_result: RecordResult
    ) -> None:
        self._pool, self._config, self._lease_s, self._record_result = pool, config, lease_s, record_result
        self._exit_stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._snapshot, self._commands_since = "", list[SandboxCommand]()
        """Last snapshot, and the commands executed since."""
        self._old_snapshots: list[str] = []
        """Snapshots older than `_snapshot`."""
        self._answered_calls = 0
        """Number of answered commands of the episode."""

    async def __aenter__(self) -> "EpisodeSandbox":
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self._exit_stack.aclose()
        await self._forget_old_snapshots()
        if self._snapshot and kind is None:  # after an error the next attempt may start from it
            await self._pool.forget(self._snapshot)

    async def run(self, order: SandboxCommand) -> tuple[Executed, str]:
        """Run a command; return its result, and the new snapshot if one is due.

        Raises:
            SandboxDied: the sandbox does not respond; the episode fails.
        """
        sandbox = await self._running_sandbox()
        executed = await sandbox.exec(order)
        await self._forget_old_snapshots()
        every = self._config.snapshot_calls
        return executed, await sandbox.snapshot() if every and (self._answered_calls + 1) % every == 0 else ""

    def record_answer(self, order: SandboxCommand, snapshot: str) -> None:
        """Record that a command was answered: by `run`, or from the record, which contains its snapshot."""
        self._answered_calls += 1
        if snapshot:
            self._old_snapshots += [self._snapshot] if self._snapshot else []
            self._snapshot, self._commands_since = snapshot, []
        else:
            self._commands_since.append(order)

    async def _forget_old_snapshots(self) -> None:
        while self._old_snapshots:
            await self._pool.forget(self._old_snapshots.pop())

    async def _running_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            start = Start(self._lease_s, snapshot=self._snapshot)

            async def start_sandbox() -> dict[str, Any]:
                self._sandbox = await self._exit_stack.enter_async_context(self._pool.leased(start))
                return {"sandbox": self._config.name, "commands_again": len(self._commands_since)}

            await self._record_result(f"sandbox after {self._answered_calls} calls", start_sandbox)
            if self._sandbox is None:  # the start is recorded: this is a later sandbox
                await start_sandbox()
            assert self._sandbox is not None
            for order in self._commands_since:
                await self._sandbox.exec(order)
            if self._answered_calls:
                log.info(
                    "sandbox.continued calls=%d again=%d", self._answered_calls, len(self._commands_since)
                )
        return self._sandbox
