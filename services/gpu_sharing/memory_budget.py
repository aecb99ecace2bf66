"""Section `[colocated]`, and whether what shares a GPU fits on it: pure arithmetic on the settings, done
before anything is allocated.

By turns: the engines' share, their staging copies and what the trainer leaves behind; then the trainer's
state and what sleeping engines leave behind. GiB throughout.
"""

from dataclasses import dataclass

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from trainer.config import AlgorithmConfig, ParallelConfig, TrainerConfig, WeightConfig

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SIZED_BY_FRACTION = ("sglang", "vllm")
"""Engines that take `engine.memory_fraction` of the device, whatever the model needs."""
CONTEXT_GB = 1.5
"""CUDA context, libraries, captured graphs and communicators of one process: they stay on the device while it
sleeps."""
IPC_VERSIONS = 2
"""Versions that the transport `ipc` keeps on the trainer's GPU."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What is on one device at a time, GiB."""

    engines: float
    staging: float
    published: float
    trainer: float

    @property
    def engines_turn(self) -> float:
        return self.engines + self.staging + self.published + CONTEXT_GB

    def trainers_turn(self, workers: int) -> float:
        """With so many engines asleep beside it."""
        return self.trainer + self.published + workers * CONTEXT_GB


def check_budget(
    *,
    total_gb: float,
    parameters: int,
    workers: int,
    engine: EngineConfig,
    trainer: TrainerConfig,
    parallel: ParallelConfig,
    algorithm: AlgorithmConfig,
    weights: WeightConfig,
    adapters: bool = False,
) -> GpuMemory:
    """Compare both turns with what a device has.

    Args:
        total_gb: memory of one device.
        parameters: of the whole model.
        workers: engines that sleep on each device.
        adapters: only adapters are trained and published; they are small enough to be left out.

    Raises:
        SettingsError: with the settings and the numbers.
    """
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    version = 0.0 if adapters else parameters * ITEM_BYTES[engine.dtype] / GIB
    copy = engine.staging_mb / 1024 or version / engine.tensor_parallel_size
    live = (
        0.0
        if engine.name in SIZED_BY_FRACTION
        else parameters * ITEM_BYTES[engine.dtype] / GIB + engine.buffer_size_gb
    )
    shares = GpuMemory(
        engines=workers * (live or engine.memory_fraction * total_gb),
        staging=workers * copy,
        published=IPC_VERSIONS * version if weights.transport == "ipc" else 0.0,
        trainer=trainer.memory_gb or _state_gb(parameters, trainer, algorithm, adapters=adapters) / ranks,
    )
    if shares.engines_turn > total_gb:
        held = "engine.memory_fraction" if not live else "the model"
        raise SettingsError(
            f"the engines' turn does not fit on a GPU of {total_gb:.1f} GiB: {shares.engines:.1f} for {workers} engine(s) ({held}), "
            f"{shares.staging:.1f} staging (engine.staging_mb), {shares.published:.1f} published (weights.transport {weights.transport}), "
            f"{CONTEXT_GB:.1f} the trainer's context: lower engine.memory_fraction"
        )
    if shares.trainers_turn(workers) > total_gb:
        said = (
            "trainer.memory_gb"
            if trainer.memory_gb
            else "by the model's size; activations come on top, set trainer.memory_gb"
        )
        raise SettingsError(
            f"the trainer's turn does not fit on a GPU of {total_gb:.1f} GiB: {shares.trainer:.1f} for training ({said}), "
            f"{shares.published:.1f} published (weights.transport {weights.transport}), {workers * CONTEXT_GB:.1f} the context of "
            f"{workers} sleeping engine(s): lower trainer.memory_gb, or spread the trainer over more GPUs ([parallel])"
        )
    return shares


def _state_gb(
    parameters: int, trainer: TrainerConfig, algorithm: AlgorithmConfig, *, adapters: bool
) -> float:
    """Parameters, gradients, masters and moments, and a reference model if there is one."""
    item = ITEM_BYTES[trainer.dtype]
    masters = 0 if trainer.dtype == "float32" else 4
    state = item if adapters else item + 4 + masters + 8
    reference = item if algorithm.kl_coef > 0 else 0
    return parameters * (state + reference) / GIB
