"""Manages worker processes: starts a process on demand, and replaces unhealthy processes."""

import asyncio
from collections.abc import Collection, Sequence

from protocol.errors import RewardError
from reward.config import RewardConfig, VerifierConfig
from reward.workers.client import WorkerClient, WorkerEnded
from reward.workers.frames import CallOutcome, GroupFrame

CLOSED = "the score pool is closed"


class WorkerSlot:
    """Slot for one worker process."""

    def __init__(
        self,
        config: RewardConfig,
        modules: Sequence[str],
        verifiers: Sequence[VerifierConfig | None],
        *,
        is_concurrent: bool,
        withheld: Collection[str] = (),
    ) -> None:
        """Prepare the slot without a process. Arguments as in `WorkerClient.start`."""
        self._config, self._modules, self._verifiers = config, modules, verifiers
        self._is_concurrent, self._withheld = is_concurrent, withheld
        self._worker: WorkerClient | None = None
        self._starting = asyncio.Lock()
        self._start: asyncio.Timeout | None = None
        """Timeout of the start in progress; `close` makes it expire."""
        self._closed = False

    async def worker(self) -> WorkerClient:
        """Return a healthy process: the current process or a new one.

        Raises:
            SettingsError, RewardError: the process does not start, or the slot is closed.
        """
        async with self._starting:
            if self._worker is not None and not self._worker.healthy:
                await self._worker.end()
                self._worker = None
            if self._closed:
                raise RewardError(CLOSED)
            if self._worker is None:
                self._worker = await self._started()
            return self._worker

    async def _started(self) -> WorkerClient:
        """Start a process. Raises as `worker`."""
        try:
            async with asyncio.timeout(None) as self._start:
                return await WorkerClient.start(
                    self._config,
                    self._modules,
                    self._verifiers,
                    is_concurrent=self._is_concurrent,
                    withheld=self._withheld,
                )
        except TimeoutError:
            raise RewardError(CLOSED) from None
        finally:
            self._start = None

    def forget(self, group: GroupFrame) -> None:
        """Let the process forget a scored group."""
        if self._worker is not None:
            self._worker.forget(group)

    async def close(self) -> None:
        """End the process, even while starting; its calls fail. Idempotent."""
        self._closed = True
        if self._start is not None:
            start, self._start = self._start, None
            start.reschedule(0.0)
        async with self._starting:
            if self._worker is not None:
                await self._worker.end()


class SharedSlots:
    """One process for the calls of all groups, and one for repeating calls in isolation.

    When a process ends or its event loop hangs, any of its calls may be the cause. Each call is repeated
    alone in the second process, where only the faulty call fails.
    """

    def __init__(
        self,
        config: RewardConfig,
        modules: Sequence[str],
        verifiers: Sequence[VerifierConfig | None],
        withheld: Collection[str] = (),
    ) -> None:
        """Create two slots without processes. `verifiers` has None for each verifier that is not awaited."""
        self._shared, self._isolated = (
            WorkerSlot(config, modules, verifiers, is_concurrent=True, withheld=withheld) for _ in range(2)
        )
        self._isolated_lock = asyncio.Lock()

    async def call(self, group: GroupFrame, verifier: int, samples: Sequence[int]) -> CallOutcome:
        """Return the outcome of a call.

        Raises:
            SettingsError, RewardError: a process does not start, or the slots are closed.
        """
        shared = await self._shared.worker()
        try:
            return await shared.call(group, verifier, samples)
        except WorkerEnded as ended:
            if ended.was_only_call:
                return ended.outcome(samples)
        async with self._isolated_lock:
            isolated = await self._isolated.worker()
            try:
                return await isolated.call(group, verifier, samples)
            except WorkerEnded as ended:
                return ended.outcome(samples)

    def forget(self, group: GroupFrame) -> None:
        """Let the processes forget a scored group."""
        self._shared.forget(group)
        self._isolated.forget(group)

    async def close(self) -> None:
        """End the processes; their calls fail. Idempotent."""
        await self._shared.close()
        await self._isolated.close()
