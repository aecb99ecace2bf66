"""The project's vLLM engine with a clock in its worker, and requests that keep an engine busy."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from rollout.engines.base import Completion, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.vllm.engine import VllmEngine
from rollout.engines.vllm.launch import sampling_parameters
from tests.benchmarks.gpu.gaps import Step
from tests.benchmarks.gpu.shapes import PROMPT, SIZES

START_S = 300.0
CALL_S = 120.0
FULL_S = 60.0
"""For all requests to be decoded at a time."""
POLL_S = 0.1
WORKER = "tests.benchmarks.gpu.worker.MeasuredWorker"


class Measured(Protocol):
    """An engine whose steps are timed."""

    @property
    def recomputes(self) -> bool:
        """Whether a commit of the project's own drops the KV cache of running requests."""

    async def steps(self) -> list[Step]:
        """The steps since the last call."""

    async def generate(self, request: Request) -> Completion:
        """As the engine does."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """As the engine does."""

    async def stream(self, request: Request, times: list[float], stopped: Callable[[], bool]) -> None:
        """Generate until `stopped`; write down when each token comes, where the engine streams them."""


class MeasuredEngine(VllmEngine):
    """`VllmEngine`, and what the benchmark asks of its worker and of vLLM itself."""

    worker_extension = WORKER

    @property
    def dtype(self) -> str:
        """Data type of the parameters."""
        return self._config.dtype

    @property
    def vocabulary(self) -> int:
        """Tokens there are."""
        return self._vocab

    @property
    def recomputes(self) -> bool:
        """Whether a commit of the project's own drops the KV cache of running requests."""
        return self._config.kv is KvPolicy.RECOMPUTE

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM."""
        return self._vllm.llm

    async def worker(self, method: str, *args: Any) -> Any:
        """What the worker answers to one of its `bench_` methods."""
        async with asyncio.timeout(CALL_S):
            return (await self.llm.collective_rpc(f"bench_{method}", args=args))[0]

    async def steps(self) -> list[Step]:
        """The steps since the last call."""
        return [Step(*row) for row in await self.worker("steps")]

    async def stream(self, request: Request, times: list[float], stopped: Callable[[], bool]) -> None:
        """Generate until `stopped`; write down when each token comes."""
        from vllm.sampling_params import RequestOutputKind

        parameters = sampling_parameters(request.sampling)
        parameters.output_kind = RequestOutputKind.DELTA
        prompt = {"prompt_token_ids": list(request.prompt)}
        async with aclosing(self.llm.generate(prompt, parameters, f"stream:{request.id}")) as tokens:
            async for _ in tokens:
                times.append(time.monotonic())
                if stopped():
                    break


def engine_config(model: str, memory_fraction: float, kv: str, eager: bool, staging: str) -> EngineConfig:
    """As a user would write it for this model."""
    size = SIZES[model]
    return EngineConfig(
        name="vllm",
        dtype=size.dtype,
        memory_fraction=memory_fraction,
        max_model_len=size.max_model_len,
        max_running=size.requests,
        enforce_eager=eager,
        kv=KvPolicy(kv),
        staging=staging,
        start_timeout_s=START_S,
        stage_timeout_s=START_S,
    )


async def start_engine(config: EngineConfig, model_dir: Path) -> MeasuredEngine:
    """An engine that is ready, its clock running."""
    engine = MeasuredEngine(config, model_dir, "bench")
    await engine.start()
    await engine.worker("clock")
    return engine


class Load:
    """Requests as long as the model allows, each followed by another. One of them is streamed, and its tokens
    are timed as they come."""

    def __init__(self, engine: Measured, model: str) -> None:
        self._engine = engine
        self._size = SIZES[model]
        self._random = random.Random(0)
        self._stopped = False
        self._ids: dict[int, str] = {}
        self.streams: list[list[float]] = [[]]
        """For each streamed request the times of its tokens."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        """Keeps the requests running inside the block; a request that fails ends it."""
        async with asyncio.TaskGroup() as group:
            for slot in range(self._size.requests - 1):
                group.create_task(self._repeat(slot, self._generate), name=f"request-{slot}")
            group.create_task(self._repeat(-1, self._streamed), name="streamed")
            try:
                await self._full()
                yield self
            finally:
                self._stopped = True
                await self._engine.abort(list(self._ids.values()))

    async def _full(self) -> None:
        async with asyncio.timeout(FULL_S):
            while True:
                if any(step.requests >= self._size.requests for step in await self._engine.steps()):
                    return
                await asyncio.sleep(POLL_S)

    async def _repeat(self, slot: int, one: Callable[[int, Request], Awaitable[None]]) -> None:
        count = 0
        while not self._stopped:
            prompt = tuple(self._random.randrange(10, self._size.vocabulary) for _ in range(PROMPT))
            sampling = Sampling(max_tokens=self._size.max_model_len - PROMPT)
            await one(slot, Request(f"bench-{slot}-{count}", prompt, sampling))
            count += 1

    async def _generate(self, slot: int, request: Request) -> None:
        self._ids[slot] = request.id
        await self._engine.generate(request)

    async def _streamed(self, slot: int, request: Request) -> None:
        self._ids[slot] = request.id
        times: list[float] = []
        self.streams.append(times)
        await self._engine.stream(request, times, lambda: self._stopped)
