"""Measures one engine in a process of its own: `python -m tests.benchmarks.generation.session --way vllm`.

It prints {"event": "ready", ...} when the engine is warm. Then orders come as lines of JSON on its input,
{"kind": "" | "commits" | "log-probabilities", "running": requests at a time}, and each is answered by
{"event": "rate", ...}. The end of the input ends it.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rollout.engines.base import EngineConfig, KvPolicy, Request
from tests.benchmarks.generation.engines import (
    START_S,
    Commits,
    RequestOptions,
    bare_sglang,
    bare_vllm,
    ours,
    publishing,
)
from tests.benchmarks.generation.load import Generate, rate_of, requests_of
from tests.benchmarks.gpu.shapes import SIZES, write_model
from tests.contracts.sglang_environment import sglang_settings

WAYS = ("vllm-bare", "vllm", "sglang-bare", "sglang", "megatron", "megatron-graphs")
BARE_ENGINES = {"vllm-bare": bare_vllm, "sglang-bare": bare_sglang}
COMMITTING = "commits"
LOGPROBS = "log-probabilities"


def say(event: str, **values: Any) -> None:
    """Print an event."""
    print(json.dumps({"event": event, **values}), flush=True)


def config_of(arguments: argparse.Namespace) -> EngineConfig:
    """As `auto` makes it for an engine that has the GPU alone, or a CPU."""
    size = SIZES[arguments.model]
    options: dict[str, Any] = {"start_timeout_s": START_S}
    if arguments.way.startswith("sglang"):
        options = sglang_settings() | {"attention_backend": arguments.sglang_attention}
    return EngineConfig(
        name=arguments.way.split("-")[0],
        dtype=size.dtype,
        memory_fraction=arguments.memory_fraction,
        max_model_len=size.max_model_len,
        max_running=max(512, *arguments.running) if torch.cuda.is_available() else max(arguments.running),
        enforce_eager=arguments.way == "megatron"
        or not (torch.cuda.is_available() or arguments.way == "megatron-graphs"),
        kv=KvPolicy(arguments.kv),
        **options,
    )


Load = Callable[[str, int], Awaitable[dict[str, Any]]]
"""Runs the load of a kind with so many requests at a time, and returns its rate."""


class Session:
    """One way, started once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    async def run(self) -> None:
        """Start the engine, run the loads that are ordered, end it."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tether-bench-") as directory:
            model_dir = await asyncio.to_thread(write_model, self._arguments.model, Path(directory) / "model")
            async with self._engine(config_of(self._arguments), model_dir) as load:
                say("ready", start_s=time.monotonic() - began)
                while line := await asyncio.to_thread(sys.stdin.readline):
                    order = json.loads(line)
                    say("rate", **await load(order["kind"], order["running"]))

    @asynccontextmanager
    async def _engine(self, config: EngineConfig, model_dir: Path) -> AsyncIterator[Load]:
        if bare := BARE_ENGINES.get(self._arguments.way):
            options = RequestOptions()
            async with bare(config, model_dir, options) as generate:

                async def load_bare(kind: str, running: int) -> dict[str, Any]:
                    options.logprobs = kind == LOGPROBS
                    return {"kind": kind, **await self._rate(generate, running)}

                await self._warm(generate)
                yield load_bare
            return
        model, transport = self._arguments.model, self._arguments.transport
        async with (
            ours(config, model_dir, model) as engine,
            publishing(engine, model, model_dir, transport) as way,
        ):

            async def generate_ours(request: Request) -> int:
                return len((await engine.generate(request)).tokens)

            async def load_ours(kind: str, running: int) -> dict[str, Any]:
                if kind != COMMITTING:
                    return {"kind": kind, **await self._rate(generate_ours, running)}
                commits = Commits([])
                async with commits.every(engine, way, self._arguments.interval_s):
                    rate = await self._rate(generate_ours, running)
                return {"kind": kind, **rate, "paused_ms": commits.paused_ms}

            await self._warm(generate_ours)
            yield load_ours

    async def _warm(self, generate: Generate) -> None:
        """Run short loads that are not measured: the first steps of each size compile."""
        for running in self._arguments.running:
            warm = requests_of(running, SIZES[self._arguments.model].vocabulary, share=0.5)[: 2 * running]
            await rate_of(generate, warm, running)

    async def _rate(self, generate: Generate, running: int) -> dict[str, Any]:
        requests = requests_of(running, SIZES[self._arguments.model].vocabulary, self._arguments.share)
        rate = await rate_of(generate, requests, running)
        return {"tokens_per_s": rate.tokens_per_s, **asdict(rate)}


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(word) for word in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` passes on."""
    parser.add_argument("--model", choices=SIZES, default="0.5b")
    parser.add_argument("--running", type=numbers, default="32,128,512", help="requests at a time")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual lengths of completions")
    parser.add_argument("--interval-s", type=float, default=2.0, help="from one version to the next")
    transport = "ipc" if torch.cuda.is_available() else "shm"
    parser.add_argument("--transport", default=transport, help="of versions, from a trainer's process")
    parser.add_argument("--memory-fraction", type=float, default=0.8, help="of all engines at once")
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--sglang-attention", default="", help="attention kernels; empty: SGLang's choice")


def main() -> None:
    """Measure the way that the command line names."""
    parser = argparse.ArgumentParser(description="Tokens/s of one engine.")
    parser.add_argument("--way", choices=WAYS, required=True)
    add_options(parser)
    asyncio.run(Session(parser.parse_args()).run())


if __name__ == "__main__":
    main()
