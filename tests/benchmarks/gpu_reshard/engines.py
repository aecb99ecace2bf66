"""The engines that are updated: the project's vLLM and SGLang, their steps timed."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.engines.base import EngineConfig, KvPolicy, Request
from rollout.engines.sglang import launch
from rollout.engines.sglang.engine import SglangEngine
from tests.benchmarks.gpu.engine import START_S, MeasuredEngine
from tests.benchmarks.gpu.gaps import Step
from tests.benchmarks.gpu.shapes import SIZES
from tests.contracts.sglang_environment import sglang_settings

STEPS = "BENCH_STEPS"
"""Environment variable that names the file of an SGLang scheduler's steps."""
ROW = struct.Struct("<dI?")
"""A step in that file: seconds of the monotonic clock, requests, whether it computes prompts."""
CLOCK = "bench = tests.benchmarks.gpu_reshard.sglang_clock:load\n"
MEMORY = {("vllm", 1): 0.17, ("vllm", 2): 0.1, ("sglang", 1): 0.45, ("sglang", 2): 0.5}
"""Engine and ranks -> `memory_fraction`: vLLM's is of the whole GPU, SGLang's of what the trainer leaves."""
UNBALANCED = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""The trainer's ranks, of which the first keeps the versions, leave unequal room."""


class MeasuredSglang(SglangEngine):
    """`SglangEngine`, whose scheduler writes down its steps."""

    _read = 0
    """Bytes of the file that were read."""

    @property
    def recomputes(self) -> bool:
        """Whether a commit drops the KV cache of running requests."""
        return self._config.kv is KvPolicy.RECOMPUTE

    async def steps(self) -> list[Step]:
        """The steps since the last call."""
        path = Path(self._config.environment[STEPS])
        data = path.read_bytes()[self._read :] if path.exists() else b""
        data = data[: len(data) // ROW.size * ROW.size]
        self._read += len(data)
        return [Step(*row) for row in ROW.iter_unpack(data)]

    async def stream(self, request: Request, times: list[float], stopped: Callable[[], bool]) -> None:
        """Generate as any other request: its tokens are not timed."""
        await self.generate(request)


def config_of(name: str, ranks: int, model: str, steps: Path, *, graphs: bool, memory: float) -> EngineConfig:
    """As a user would write it for this model.

    Args:
        steps: file for SGLang's steps.
        memory: `memory_fraction`; 0: what fits beside the trainer.
    """
    size = SIZES[model]
    options: dict[str, Any] = {"start_timeout_s": START_S}
    if name == "sglang":
        options = sglang_settings(ranks)
        options["environment"] = {STEPS: str(steps), **UNBALANCED, **options.get("environment", {})}
    return EngineConfig(
        name=name,
        dtype=size.dtype,
        tensor_parallel_size=ranks,
        memory_fraction=memory or MEMORY[name, min(ranks, 2)],
        max_model_len=size.max_model_len,
        max_running=size.requests,
        enforce_eager=not graphs,
        kv=KvPolicy.KEEP,
        **options,
    )


async def start_engine(config: EngineConfig, model_dir: Path) -> MeasuredEngine | MeasuredSglang:
    """An engine that is ready, its steps timed."""
    if config.name == "sglang":
        if CLOCK not in launch.ENTRY_POINT:
            launch.ENTRY_POINT += CLOCK
        served = MeasuredSglang(config, model_dir, "bench")
        await served.start()
        return served
    engine = MeasuredEngine(config, model_dir, "bench")
    await engine.start()
    await engine.worker("clock")
    return engine
