"""Keeps worker processes: starts one when it is needed, and replaces one that is not healthy."""

import asyncio
from collections.abc import Collection, Sequence

from protocol.errors import RewardError
from reward.config import RewardConfig, VerifierConfig
from reward.workers.client import WorkerClient, WorkerEnded
from reward.workers.frames import CallOutcome, GroupFrame

CLOSED = "the score pool is closed"


class WorkerSlot:
    """Place of one worker process."""

    def __init__(
        self,
        config: RewardConfig,
        modules: Sequence[str],
        verifiers: Sequence[VerifierConfig | None],
        *,
        is_concurrent: bool,
        withheld: Collection[str] = (),
    ) -> None:
        """Prepare the slot without a process. The arguments are as for `WorkerClient.start`."""
        self._config, self._modules, self._verifiers = config, modules, verifiers
        self._is_concurrent, self._withheld = is_concurrent, withheld
        self._worker: WorkerClient | None = None
        self._starting = asyncio.Lock()
        self._start: asyncio.Timeout | None = None
        """Time limit of the start that is under way; `close` makes it expire."""
        self._closed = False

    async def worker(self) -> WorkerClient:
        """Return the process, which is healthy: the last one or a new one.

        Raises:
            SettingsError, RewardError: it does not start, or the slot is closed.
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
        """Let the process forget a group that is scored."""
        if self._worker is not None:
            self._worker.forget(group)

    async def close(self) -> None:
        """End the process, also one that is still starting; calls in it have errors. Idempotent."""
        self._closed = True
        if self._start is not None:
            start, self._start = self._start, None
            start.reschedule(0.0)
        async with self._starting:
            if self._worker is not None:
                await self._worker.end()


class SharedSlots:
    """One process for the calls of all groups, and one for calls that are repeated alone.

    When a process ends, or its event loop stands still, any of the calls in it may be to blame. Each is
    repeated, one after the other, in the second process: there only the guilty one fails.
    """

    def __init__(
        self,
        config: RewardConfig,
        modules: Sequence[str],
        verifiers: Sequence[VerifierConfig | None],
        withheld: Collection[str] = (),
    ) -> None:
        """Make two slots without processes. `verifiers` are the ones that wait, None for each other one."""
        self._shared, self._single = (
            WorkerSlot(config, modules, verifiers, is_concurrent=True, withheld=withheld) for _ in range(2)
        )
        self._alone = asyncio.Lock()

    async def call(self, group: GroupFrame, verifier: int, samples: Sequence[int]) -> CallOutcome:
        """Return the outcome of a call.

        Raises:
            SettingsError, RewardError: a process does not start, or the slots are closed.
        """
        shared = await self._shared.worker()
        try:
            return await shared.call(group, verifier, samples)
        except WorkerEnded as ended:
            if ended.alone:
                return ended.outcome(samples)
        async with self._alone:
            single = await self._single.worker()
            try:
                return await single.call(group, verifier, samples)
            except WorkerEnded as ended:
                return ended.outcome(samples)

    def forget(self, group: GroupFrame) -> None:
        """Let the processes forget a group that is scored."""
        self._shared.forget(group)
        self._single.forget(group)

    async def close(self) -> None:
        """End the processes; calls in them have errors. Idempotent."""
        await self._shared.close()
        await self._single.close()
