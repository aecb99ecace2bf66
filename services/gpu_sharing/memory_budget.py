"""Checks from the settings whether trainer and engines fit on their shared GPU.

Pure arithmetic, before any allocation. In the engines' turn the device holds the engines, their staging
copies and the trainer's remaining memory. In the trainer's turn it holds the trainer's state and the sleeping
engines' remaining memory. All sizes are GiB.
"""

from dataclasses import dataclass

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from trainer.algorithms.registry import ALGORITHMS
from trainer.config import AlgorithmConfig, ParallelConfig, TrainerConfig, WeightConfig
from trainer.memory.expected import GIB, ITEM_BYTES

FRACTION_SIZED_ENGINES = ("sglang", "vllm")
"""Engines that allocate `engine.memory_fraction` of the device for any model."""
CONTEXT_GB = 1.5
"""Memory of one process that remains during sleep: CUDA context, libraries, graphs, communicators."""
IPC_VERSIONS = 2
"""Number of versions that the transport `ipc` keeps on GPUs, sharded over the ranks."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of each part of a colocated run on one device, GiB."""

    engines: float
    """Weights and KV cache of all engines on the device."""
    staging: float
    """Staging copies of their weights."""
    published: float
    """Versions that the trainer keeps on the device for engines to copy."""
    trainer: float
    """The trainer's state."""

    @property
    def engine_turn_gb(self) -> float:
        return self.engines + self.staging + self.published + CONTEXT_GB

    def trainer_turn_gb(self, workers: int) -> float:
        """Return the memory of the trainer's turn with `workers` sleeping engines, GiB."""
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
    expected_gb: float | None = None,
) -> GpuMemory:
    """Compare both turns with the memory of a device.

    Args:
        total_gb: memory of one device, GiB.
        parameters: number of parameters of the whole model.
        workers: number of engines on each device.
        adapters: whether only adapters are trained and published; their memory is neglected.
        expected_gb: expected peak of a trainer rank with activations; None: estimated from the model's size.

    Raises:
        SettingsError: a turn does not fit; the message has the settings and the numbers.
    """
    weights_gb = parameters * ITEM_BYTES[engine.dtype] / GIB
    version_gb = 0.0 if adapters else weights_gb
    staging_gb = engine.staging_mb / 1024 or version_gb / engine.tensor_parallel_size
    if engine.staging in ("host", "layers"):
        staging_gb = 0.0
    if engine.name in FRACTION_SIZED_ENGINES:
        engine_gb = engine.memory_fraction * total_gb
    else:
        engine_gb = weights_gb + engine.buffer_size_gb
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    memory = GpuMemory(
        engines=workers * engine_gb,
        staging=workers * staging_gb,
        published=IPC_VERSIONS * version_gb / ranks if weights.transport == "ipc" else 0.0,
        trainer=trainer.memory_gb
        or expected_gb
        or _state_gb(parameters, trainer, algorithm, adapters=adapters) / ranks,
    )
    source = "by the model's size; activations come on top, set trainer.memory_gb"
    if trainer.memory_gb:
        source = "trainer.memory_gb"
    elif expected_gb:
        source = "the expected peak of a step"
    _check_fits(memory, total_gb, workers, engine, source, weights)
    return memory


def _check_fits(
    memory: GpuMemory,
    total_gb: float,
    workers: int,
    engine: EngineConfig,
    trainer_source: str,
    weights: WeightConfig,
) -> None:
    published = f"{memory.published:.1f} published (weights.transport {weights.transport})"
    if memory.engine_turn_gb > total_gb:
        engine_source = "engine.memory_fraction" if engine.name in FRACTION_SIZED_ENGINES else "the model"
        raise SettingsError(
            f"the engines' turn does not fit on a GPU of {total_gb:.1f} GiB: {memory.engines:.1f} for "
            f"{workers} engine(s) ({engine_source}), {memory.staging:.1f} staging (engine.staging_mb), "
            f"{published}, {CONTEXT_GB:.1f} the trainer's context: lower engine.memory_fraction"
        )
    if memory.trainer_turn_gb(workers) > total_gb:
        raise SettingsError(
            f"the trainer's turn does not fit on a GPU of {total_gb:.1f} GiB: {memory.trainer:.1f} for "
            f"training ({trainer_source}), {published}, {workers * CONTEXT_GB:.1f} the context of {workers} "
            "sleeping engine(s): lower trainer.memory_gb, or spread the trainer over more GPUs ([parallel])"
        )


def _state_gb(
    parameters: int, trainer: TrainerConfig, algorithm: AlgorithmConfig, *, adapters: bool
) -> float:
    """Return the GiB of parameters, gradients, masters and moments, with reference model and critic."""
    item = ITEM_BYTES[trainer.dtype]
    masters = 0 if trainer.dtype == "float32" else 4
    state = item if adapters else item + 4 + masters + 8
    reference = item if algorithm.kl_coef > 0 and not adapters else 0
    critic = item + 4 + masters + 8 if ALGORITHMS[algorithm.name].has_critic else 0
    return parameters * (state + reference + critic) / GIB
