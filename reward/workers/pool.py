"""Runs verifiers in a pool of worker processes: one that hangs or crashes costs one process and one score."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.ranges import check_ranges
from reward.combine import VerifierError, combine
from reward.config import RewardConfig
from reward.verifiers.registry import checked_verifier
from reward.workers.client import WorkerClient

ENVIRONMENT = "environment"
"""Name of the component with the environment's reward."""
TIMED_OUT = "timed_out"
"""Name of the component that counts, for each sample, the verifiers of which it got `timeout_score`. It is
there only if there are such samples, and no part of the reward."""


class ScorePool:
    """Pool of `config.workers` processes that score one group each at a time; an async context manager."""

    def __init__(self, config: RewardConfig, modules: Sequence[str] = ()) -> None:
        """Check the section.

        Args:
            config: the section.
            modules: directories with modules of the user, for the workers.

        Raises:
            SettingsError: a verifier is unknown, two have one name, or a number is out of range.
        """
        check_ranges(config, "reward")
        for verifier in config.verifiers:
            checked_verifier(verifier.name)
        names = [verifier.component for verifier in config.verifiers]
        if len({*names, ENVIRONMENT, TIMED_OUT}) != len(names) + 2:
            raise SettingsError(
                f"setting reward.verifiers: {', '.join(names)}: each needs a name of its own, "
                f"other than {ENVIRONMENT!r} and {TIMED_OUT!r}; give a `label`"
            )
        self._config, self._modules = config, tuple(modules)
        self._weights = {verifier.component: verifier.weight for verifier in config.verifiers} | {
            ENVIRONMENT: config.environment_weight,
            TIMED_OUT: 0.0,
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
        token_counts: Sequence[int] | None = None,
        finish_reasons: Sequence[str] | None = None,
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Score a group on a free worker, for which it waits; cancelling the call replaces that worker.

        Args:
            prompt_text: the prompt as text.
            responses: [n] the samples as text.
            metadata: a MessagePack map, or a mapping to encode as one.
            environment: [n] rewards of the environment, which are one more component.
            token_counts: [n] tokens of the samples; by default 0.
            finish_reasons: [n] why they ended; by default "stop".

        Returns:
            [n] combined rewards, and component -> [n] scores.

        Raises:
            RewardError: a score could not be computed; a `VerifierError` names the verifier.
        """
        components: dict[str, list[float]] = {}
        n = len(responses)
        if self._config.verifiers:
            counts, reasons = token_counts or [0] * n, finish_reasons or ["stop"] * n
            group = _group_frame(prompt_text, list(responses), metadata, list(counts), list(reasons))
            components = await self._components(group, n)
        if environment is not None:
            components[ENVIRONMENT] = list(environment)
        return combine(components, self._weights), components

    async def _components(self, group: bytes, n: int) -> dict[str, list[float]]:
        """Return component -> [n] scores.

        A sample that is late is tried once more, on another worker; if it is late again it gets
        `timeout_score`.

        Raises:
            VerifierError: a verifier failed; or was late, and there is no `timeout_score`.
        """
        names = [verifier.component for verifier in self._config.verifiers]
        scores = {name: [0.0] * n for name in names}
        given_up = [0.0] * n
        calls: deque[tuple[int, list[int], bool]] | None = None
        while calls is None or calls:
            async with self._worker() as worker:
                if calls is None:
                    calls = deque(
                        (verifier, samples, False)
                        for verifier, at_once in enumerate(worker.at_once)
                        for samples in ([list(range(n))] if at_once else [[i] for i in range(n)])
                    )
                while calls and worker.healthy:
                    verifier, samples, is_second = calls.popleft()
                    got = await worker.call(group, verifier, samples)
                    late = [i for i, score in zip(samples, got, strict=True) if score is None]
                    for i, score in zip(samples, got, strict=True):
                        if score is not None:
                            scores[names[verifier]][i] = score
                    if not late:
                        continue
                    if not is_second and self._config.timeout_score is not None:
                        calls.appendleft((verifier, late, True))
                        continue
                    for i in late:
                        scores[names[verifier]][i] = self._timeout_score(names[verifier], i)
                        given_up[i] += 1.0
        return scores | ({TIMED_OUT: given_up} if any(given_up) else {})

    def _timeout_score(self, verifier: str, sample: int) -> float:
        """Return the score of a sample that was late. Raises VerifierError if none is set."""
        limit, score = self._config.timeout_s, self._config.timeout_score
        if score is None:
            raise VerifierError(verifier, f"no score for sample {sample} within reward.timeout_s {limit}")
        return score

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


def _group_frame(
    prompt_text: str,
    responses: list[str],
    metadata: bytes | msgspec.Raw | Mapping[str, Any],
    *rest: list[Any],
) -> bytes:
    """Return the frame that describes a group to a worker. Raises RewardError if a text is none."""
    try:
        packed = msgspec.msgpack.encode(dict(metadata)) if isinstance(metadata, Mapping) else bytes(metadata)
        return msgspec.msgpack.encode(["group", prompt_text, responses, packed, *rest])
    except UnicodeEncodeError as error:
        raise RewardError(f"prompt, response or metadata is no valid text: {error}") from None
