"""The pool of worker processes that verifiers run in, so that a hung or crashing verifier costs one process
and nothing else."""

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
"""The component with the environment's own reward."""


class ScorePool:
    """`async with ScorePool(config) as pool`: `config.workers` processes, each scoring one group at a
    time."""

    def __init__(self, config: RewardConfig) -> None:
        """Check the section.

        Raises:
            SettingsError: for unknown or repeated verifiers and numbers out of range.
        """
        names = [verifier.name for verifier in config.verifiers]
        for name in names:
            checked_verifier(name)
        if len(set(names)) != len(names):
            raise SettingsError(f"setting reward.verifiers: {', '.join(names)}: each verifier at most once")
        if config.workers < 1 or config.timeout_s <= 0:
            raise SettingsError("settings reward.workers must be at least 1 and reward.timeout_s above 0")
        self._config = config
        self._weights = {verifier.name: verifier.weight for verifier in config.verifiers} | {
            ENVIRONMENT: config.environment_weight
        }
        self._places: asyncio.Queue[WorkerClient | None] = asyncio.Queue()
        """One entry for each worker that is free; None where its process has to be started first. Whoever
        takes one puts one back."""
        for _ in range(config.workers):
            self._places.put_nowait(None)
        self._living: set[WorkerClient] = set()
        self._closed = False

    async def __aenter__(self) -> "ScorePool":
        """Start one worker, which checks options and imports; the others start when they are needed.

        Raises:
            SettingsError, RewardError: if it does not start.
        """
        if self._config.verifiers:
            async with self._scorer():
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
        """Score a group; waits for a free worker. Cancelling it ends and replaces the worker that was busy
        with it.

        Args:
            prompt_text: what verifiers see of the prompt.
            responses: [n] the samples as text.
            metadata: a MessagePack map, or what can be packed to one.
            environment: [n] rewards that the environment gave, as one more component.

        Returns:
            [n] combined rewards, and [n] scores of each verifier.

        Raises:
            RewardError: if a score could not be computed; a `VerifierError` names the verifier.
        """
        components: dict[str, list[float]] = {}
        if self._config.verifiers:
            packed = (
                msgspec.msgpack.encode(dict(metadata)) if isinstance(metadata, Mapping) else bytes(metadata)
            )
            async with self._scorer() as scorer:
                components = await scorer.score(prompt_text, responses, packed)
        if environment is not None:
            components[ENVIRONMENT] = list(environment)
        return combine(components, self._weights), components

    async def close(self) -> None:
        """End all workers; scores in progress fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for scorer in self._living:
            scorer.kill()
        for _ in range(self._config.workers):
            idle = await self._places.get()
            if idle is not None:
                await self._end(idle)

    @contextlib.asynccontextmanager
    async def _scorer(self) -> AsyncIterator[WorkerClient]:
        """A worker for one group; one that is not healthy afterwards is ended, and its place is for a new
        one."""
        place: WorkerClient | None = await self._places.get()
        try:
            if self._closed:
                raise RewardError("the score pool is closed")
            if place is None:
                place = await WorkerClient.start(self._config)
                self._living.add(place)
            yield place
        finally:
            try:
                if place is not None and (self._closed or not place.healthy):
                    ending, place = place, None
                    await self._end(ending)
            finally:
                self._places.put_nowait(place)

    async def _end(self, scorer: WorkerClient) -> None:
        self._living.discard(scorer)
        await scorer.end()
