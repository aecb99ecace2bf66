"""The engines that are compared: the project's, and the bare ones with all their own defaults."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import torch

from rollout.engines.base import EngineConfig, Request
from rollout.engines.contract.models import write_shm
from rollout.engines.registry import make_engine
from rollout.engines.sglang.launch import SPARE_TOKENS, free_port, kv_tokens, server_environment
from rollout.engines.vllm.imports import eager_environment, set_environment
from tests.benchmarks.generation.load import Generate
from tests.benchmarks.gpu.partner import Partner
from tests.benchmarks.gpu.shapes import SIZES
from tests.benchmarks.gpu.updates import Ours

BUCKET_BYTES = 256 << 20
START_S = 300.0
POLL_S = 0.2


@dataclass(slots=True)
class RequestOptions:
    """Options of the requests to a bare engine, read as each request begins."""

    logprobs: bool = False
    """The log-probability of each token."""


@dataclass(frozen=True, slots=True)
class Commits:
    """What an engine has committed while a load ran."""

    paused_ms: list[float]

    @asynccontextmanager
    async def every(self, engine: Any, way: Ours, interval_s: float) -> AsyncIterator[None]:
        """Publish, stage and commit a version again and again inside the block, each with its own number."""
        is_over = asyncio.Event()

        async def update() -> None:
            number = engine.served.version
            while not is_over.is_set():
                began = time.monotonic()
                number += 1
                _, figures = await way.update(number)
                self.paused_ms.append(figures["pause_ms"])
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, interval_s - (time.monotonic() - began))):
                        await is_over.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(update(), name="commits")
            yield
            is_over.set()


@asynccontextmanager
async def publishing(engine: Any, model: str, model_dir: Path, transport: str) -> AsyncIterator[Ours]:
    """Yield how a trainer's process, on the engine's device, brings versions to the engine."""
    partner = await Partner.start(model, model_dir, os.environ.get("CUDA_VISIBLE_DEVICES", "0"), START_S)
    try:
        way = Ours(engine, partner, transport)
        await way.prepare()
        yield way
    finally:
        await partner.close()


@asynccontextmanager
async def ours(
    config: EngineConfig, model_dir: Path, model: str, tensors: Mapping[str, torch.Tensor] | None = None
) -> AsyncIterator[Any]:
    """Yield the project's engine, serving a first version of these `tensors`; None: random ones."""
    engine = make_engine(config, model_dir, "bench")
    try:
        await engine.start()
        with tempfile.TemporaryDirectory(prefix="tether-bench-", dir="/dev/shm") as directory:
            manifest = await asyncio.to_thread(
                write_shm,
                Path(directory) / "version",
                random_weights(model_dir, SIZES[model].dtype) if tensors is None else tensors,
                0,
                epoch="bench",
                bucket_bytes=BUCKET_BYTES,
            )
            await engine.stage(manifest)
            await engine.commit(manifest)
            yield engine
    finally:
        await engine.close()


def random_weights(model_dir: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Return tensors of a model by checkpoint name, small enough that nothing overflows."""
    from protocol.device.checkpoint_shapes import checkpoint_shapes

    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype)).normal_(0, 0.02, generator=generator)
        for name, shape in checkpoint_shapes(model_dir).items()
    }


@asynccontextmanager
async def bare_vllm(
    config: EngineConfig, model_dir: Path, options: RequestOptions
) -> AsyncIterator[Generate]:
    """Yield what has vLLM alone generate, as its own server would be started.

    Args:
        config: model length, dtype, and the size of a CPU's cache.
        model_dir: directory of the model's config.
        options: read at each request.
    """
    on_gpu = torch.cuda.is_available()
    set_environment(config)
    with eager_environment(not on_gpu):
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        needed: dict[str, Any] = (
            {"gpu_memory_utilization": config.memory_fraction}
            if on_gpu
            else {
                "kv_cache_memory_bytes": config.kv_cache_mb << 20,
                "enforce_eager": True,
                "distributed_executor_backend": "uni",
            }
        )
        arguments = AsyncEngineArgs(
            model=str(model_dir),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config.dtype,  # type: ignore[arg-type]
            max_model_len=config.max_model_len,
            **needed,
        )
        llm = await asyncio.to_thread(
            AsyncLLM.from_engine_args, arguments, usage_context=UsageContext.OPENAI_API_SERVER
        )

    async def generate(request: Request) -> int:
        parameters = SamplingParams(
            max_tokens=request.sampling.max_tokens,
            temperature=1.0,
            logprobs=0 if options.logprobs else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        count = 0
        async for answer in llm.generate({"prompt_token_ids": list(request.prompt)}, parameters, request.id):
            count = len(answer.outputs[0].token_ids)
        return count

    try:
        yield generate
    finally:
        await asyncio.to_thread(llm.shutdown)


@asynccontextmanager
async def bare_sglang(
    config: EngineConfig, model_dir: Path, options: RequestOptions
) -> AsyncIterator[Generate]:
    """Yield what has SGLang's server alone generate."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="tether-bench-") as directory:
        # without our plug-in, whose entry point would be in the directory
        environment = server_environment(config, Path(directory))
        log = Path(directory) / "log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *_bare_command(config, model_dir, port),
                env=environment,
                stdout=output,
                stderr=output,
            )
        try:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                async with asyncio.timeout(START_S):
                    await _wait_until_ready(session, url, process, log)

                async def generate(request: Request) -> int:
                    body = {
                        "input_ids": list(request.prompt),
                        "return_logprob": options.logprobs,
                        "sampling_params": {
                            "max_new_tokens": request.sampling.max_tokens,
                            "temperature": 1.0,
                            "ignore_eos": True,
                        },
                    }
                    async with session.post(f"{url}/generate", json=body) as response:
                        response.raise_for_status()
                        return len(json.loads(await response.read())["output_ids"])

                yield generate
        finally:
            _end(process.pid)
            await process.wait()


def _end(pid: int) -> None:
    """Kill a process, if it is there, and all that it has started."""
    parts = []
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        parts = [*server.children(recursive=True), server]
    for part in parts:
        with suppress(psutil.NoSuchProcess):
            part.kill()


def _bare_command(config: EngineConfig, model_dir: Path, port: int) -> list[str]:
    words = {
        "model-path": model_dir,
        "load-format": "dummy",
        "dtype": config.dtype,
        "context-length": config.max_model_len + SPARE_TOKENS,
        "host": "127.0.0.1",
        "port": port,
        "log-level": "warning",
    }
    flags = ["skip-tokenizer-init", "skip-server-warmup"]
    if torch.cuda.is_available():
        words["mem-fraction-static"] = config.memory_fraction
        if config.attention_backend:
            words["attention-backend"] = config.attention_backend
    else:
        model = json.loads((model_dir / "config.json").read_text())
        words |= {"device": "cpu", "attention-backend": "torch_native"}
        words["max-total-tokens"] = kv_tokens(config, model)
        flags.append("disable-cuda-graph")
    return [
        config.python,
        "-m",
        "sglang.launch_server",
        *(f"--{name}={value}" for name, value in words.items()),
        *(f"--{flag}" for flag in flags),
    ]


async def _wait_until_ready(
    session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process, log: Path
) -> None:
    while True:
        if process.returncode is not None:
            raise RuntimeError(f"SGLang ended with {process.returncode}: {log.read_text()[-2000:]}")
        with suppress(aiohttp.ClientError):
            async with session.get(f"{url}/health") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(POLL_S)
