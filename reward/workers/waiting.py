"""Keeps the process in which calls wait, and finds the call that ended it."""

import asyncio
from collections.abc import Sequence

from protocol.errors import RewardError
from reward.config import RewardConfig
from reward.workers.async_client import AsyncWorkerClient, WorkerEnded
from reward.workers.outcome import CallOutcome, GroupFrame


class WaitingProcesses:
    """One process for the calls of all groups; and one for calls that are repeated alone.

    When a process ends, or its event loop stands still, nobody knows which of the calls in it is to blame.
    Each is repeated, one after the other, in the second process: there only the guilty one fails.
    """

    def __init__(self, config: RewardConfig, modules: Sequence[str]) -> None:
        """Start nothing yet."""
        self._config, self._modules = config, modules
        self.awaited: Sequence[int] = ()
        """Numbers of the verifiers that wait."""
        self._shared: AsyncWorkerClient | None = None
        self._single: AsyncWorkerClient | None = None
        self._starting, self._alone = asyncio.Lock(), asyncio.Lock()
        self._closed = False

    async def call(self, group: GroupFrame, verifier: int, samples: Sequence[int]) -> CallOutcome:
        """Return the outcome of a call.

        Raises:
            SettingsError, RewardError: a process does not start, or the pool is closed.
        """
        async with self._starting:
            self._shared = shared = await self._started(self._shared)
        try:
            return await shared.call(group, verifier, samples)
        except WorkerEnded as ended:
            if ended.alone:
                return _blamed(ended, samples)
        async with self._alone:
            self._single = single = await self._started(self._single)
            try:
                return await single.call(group, verifier, samples)
            except WorkerEnded as ended:
                return _blamed(ended, samples)

    def forget(self, group: GroupFrame) -> None:
        """Let the processes forget a group that is scored."""
        for process in (self._shared, self._single):
            if process is not None:
                process.forget(group)

    async def close(self) -> None:
        """End the processes; calls that run have errors. Idempotent."""
        self._closed = True
        for process in (self._shared, self._single):
            if process is not None:
                await process.end()

    async def _started(self, process: AsyncWorkerClient | None) -> AsyncWorkerClient:
        """Return a process that is healthy: the given one or a new one."""
        if self._closed:
            raise RewardError("the score pool is closed")
        if process is not None and process.healthy:
            return process
        if process is not None:
            await process.end()
        started = await AsyncWorkerClient.start(self._config, self._modules, self.awaited)
        if self._closed:
            await started.end()
            raise RewardError("the score pool is closed")
        return started


def _blamed(ended: WorkerEnded, samples: Sequence[int]) -> CallOutcome:
    """Return the outcome of the call that ended its process: too late if it blocked the event loop."""
    return CallOutcome([None] * len(samples)) if ended.stuck else CallOutcome([], error=str(ended))
