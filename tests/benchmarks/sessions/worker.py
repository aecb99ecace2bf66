"""Runs endpoint, sessions and the scripted engine as a rollout worker does, or calls the engine directly."""

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from protocol.weights.lora import NO_ADAPTERS
from rollout.config import EnvironmentConfig
from rollout.engines.base import Engine, EngineConfig, Request, Sampling
from rollout.engines.registry import make_engine
from rollout.render import RenderConfig, Renderer
from rollout.sessions.calls import context_tokens
from rollout.sessions.endpoint import SessionEndpoint
from rollout.sessions.model_calls import ModelCalls
from rollout.sessions.session import Session, SessionLimits
from tests.benchmarks.sessions.model import write_model
from tests.benchmarks.versions import ROOT

MAX_TOKENS = 64
"""Tokens of an answer: the scripted engine gives as many."""
MAX_MODEL_LEN = 2**13


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of calls took."""

    ms: Sequence[tuple[int, float]]
    """(turn, milliseconds) of each call, as its caller saw it."""
    seconds: float
    cpu_s: float
    """CPU time of the worker's process."""


class Worker:
    """The sessions of one process, and the harnesses in another one that call them."""

    def __init__(self, engine: Engine, renderer: Renderer, harness: asyncio.subprocess.Process) -> None:
        self._engine, self._renderer, self._harness = engine, renderer, harness
        self._endpoint = SessionEndpoint()
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, Session]] = {}
        self.sampling = Sampling(max_tokens=MAX_TOKENS)

    async def start(self) -> None:
        """Serve."""
        await self._endpoint.start()

    async def close(self) -> None:
        """End all sessions, and the harnesses."""
        await self._endpoint.close()
        assert self._harness.stdin is not None
        self._harness.stdin.close()
        await self._harness.wait()

    def open(self, count: int) -> list[int]:
        """Open sessions and return their numbers."""
        numbers = list(itertools.islice(self._numbers, count))
        for number in numbers:
            calls = ModelCalls(
                self._engine, self.sampling, EnvironmentConfig(), MAX_MODEL_LEN, f"{number}/0.{{turn}}.t"
            )
            session = Session(calls, self._renderer, SessionLimits())
            self._open[number] = (self._endpoint.open(session), session)
        return numbers

    def end(self, numbers: Sequence[int]) -> None:
        """End sessions."""
        for number in numbers:
            self._endpoint.end(self._open.pop(number)[0], "its episode is over")

    async def called(self, callers: Sequence[int], *, turns: int, at_once: int) -> Round:
        """Have some of the open sessions called, `turns` times each."""
        sessions = []
        for number, (key, _) in self._open.items():
            url = urlsplit(self._endpoint.url(key))
            sessions.append({"number": number, "host": url.hostname, "port": url.port, "path": url.path})
        asked = {"sessions": sessions, "callers": callers, "turns": turns, "at_once": at_once}
        assert self._harness.stdin is not None
        assert self._harness.stdout is not None
        self._harness.stdin.write(json.dumps(asked).encode() + b"\n")
        before = time.process_time()
        found = json.loads(await self._harness.stdout.readline())
        return Round(found["ms"], found["seconds"], time.process_time() - before)

    async def direct(self, callers: Sequence[int], *, at_once: int) -> Round:
        """Ask the engine for what it was asked for in these sessions, as their calls follow each other."""
        contexts = [
            [context_tokens(call.parent, call.inserted) for call in self._open[number][1].tree.calls]
            for number in callers
        ]
        found: list[tuple[int, float]] = []

        async def ask_share(first: int) -> None:
            for turn in range(len(contexts[0])):
                for number in range(first, len(contexts), at_once):
                    request = Request(f"{number}/1.{turn}.t", contexts[number][turn], self.sampling)
                    began = time.perf_counter()
                    await self._engine.generate(request)
                    found.append((turn + 1, (time.perf_counter() - began) * 1e3))

        before, began = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for first in range(at_once):
                tasks.create_task(ask_share(first), name=f"direct-{first}")
        return Round(found, time.perf_counter() - began, time.process_time() - before)

    def reuse(self, callers: Sequence[int]) -> dict[str, float]:
        """Return the share of prompts' tokens that the engine had cached, in first and in later calls."""
        calls = [self._open[number][1].tree.calls for number in callers]
        shares = {"first": [of[0] for of in calls], "later": [call for of in calls for call in of[1:]]}
        return {
            name: sum(call.completion.cached_tokens for call in some)
            / max(1, sum(len(call.tokens()) - len(call.completion.tokens) for call in some))
            for name, some in shares.items()
        }

    @property
    def tokens(self) -> int:
        """Tokens of all open sessions."""
        return sum(
            len(call.inserted) + len(call.completion.tokens)
            for _, session in self._open.values()
            for call in session.tree.calls
        )


@asynccontextmanager
async def running_worker(directory: Path, engine_name: str) -> AsyncIterator[Worker]:
    """Run a worker with its harnesses in a process of their own."""
    write_model(directory)
    config = EngineConfig(name=engine_name, max_model_len=MAX_MODEL_LEN, kv_cache_mb=512)
    engine = make_engine(config, directory, "engine.0", NO_ADAPTERS)
    await engine.start()
    harness = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.benchmarks.sessions.harness",
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**26,
    )  # fmt: skip
    worker = Worker(engine, Renderer(directory, RenderConfig()), harness)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()
        await engine.close()


def memory() -> int:
    """Return the memory that this process has resident, bytes."""
    found: int = psutil.Process(os.getpid()).memory_info().rss
    return found
