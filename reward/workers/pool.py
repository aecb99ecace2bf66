"""Runs verifiers in a pool of worker processes: one that hangs or crashes costs one process and one score."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from protocol.errors import RewardError, SettingsError
from reward.combine import combine
from reward.config import RewardConfig
from reward.verifiers.registry import checked_verifier
from reward.workers.client import WorkerClient

ENVIRONMENT = "environment"
"""Name of the component with the environment's reward."""


class ScorePool:
    """Pool of `config.workers` processes that score one group each at a time; an async context manager."""

    def __init__(self, config: RewardConfig, modules: Sequence[str] = ()) -> None:
        """Check the section.

        Args:
            config: the section.
            modules: directories with modules of the user, for the workers.

        Raises:
            SettingsError: a verifier is unknown or repeated, or a number is out of range.
        """
        names = [verifier.name for verifier in config.verifiers]
        for name in names:
            checked_verifier(name)
        if len(set(names)) != len(names):
            raise SettingsError(f"setting reward.verifiers: {', '.join(names)}: each verifier at most once")
        if config.workers < 1 or config.timeout_s <= 0:
            raise SettingsError("settings reward.workers must be at least 1 and reward.timeout_s above 0")
        self._config, self._modules = config, modules
        self._weights = {verifier.name: verifier.weight for verifier in config.verifiers} | {
            ENVIRONMENT: config.environment_weight
        }
        self._slots: asyncio.Queue[WorkerClient | None] = asyncio.Queue()
        """One entry per free slot: its worker, or None if that has to be started. Every taker puts one
        back."""
        for _ in range(config.workers):
            self._slots.put_nowait(None)
        self._running: set[WorkerClient] = set()
        self._closed = False

    async def __aenter__(self) -> "ScorePool":
        """Start one worker, which checks options and imports; the others start on demand.

        Raises:
            SettingsError, RewardError: it does not start.
        """
        if self._config.verifiers:
            async with self._worker():
                pass
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def score(
        self,
        prompt_text: str,
        responses: Sequence[str],
        metadata: bytes | msgspec.Raw | Mapping[str, Any],
        environment: Sequence[float] | None = None,
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Score a group on a free worker, for which it waits; cancelling the call replaces that worker.

        Args:
            prompt_text: the prompt as text.
            responses: [n] the samples as text.
            metadata: a MessagePack map, or a mapping to encode as one.
            environment: [n] rewards of the environment, which are one more component.

        Returns:
            [n] combined rewards, and component -> [n] scores.

        Raises:
            RewardError: a score could not be computed; a `VerifierError` names the verifier.
        """
        components: dict[str, list[float]] = {}
        if self._config.verifiers:
            packed = (
                msgspec.msgpack.encode(dict(metadata)) if isinstance(metadata, Mapping) else bytes(metadata)
            )
            async with self._worker() as worker:
                components = await worker.score(prompt_text, responses, packed)
        if environment is not None:
            components[ENVIRONMENT] = list(environment)
        return combine(components, self._weights), components

    async def close(self) -> None:
        """End all workers; groups that are being scored fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for worker in self._running:
            worker.kill()
        for _ in range(self._config.workers):
            idle = await self._slots.get()
            if idle is not None:
                await self._end(idle)

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerClient]:
        """Take a worker for one group; one that is not healthy afterwards is ended, and later replaced."""
        worker: WorkerClient | None = await self._slots.get()
        try:
            if self._closed:
                raise RewardError("the score pool is closed")
            if worker is None:
                worker = await WorkerClient.start(self._config, self._modules)
                self._running.add(worker)
            yield worker
        finally:
            try:
                if worker is not None and (self._closed or not worker.healthy):
                    ending, worker = worker, None
                    await self._end(ending)
            finally:
                self._slots.put_nowait(worker)

    async def _end(self, worker: WorkerClient) -> None:
        self._running.discard(worker)
        await worker.end()
