"""Runs `tether size`: computes the trainer layouts that fit, and the number of samples an engine holds."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from protocol.errors import SettingsError
from protocol.host.hub import Kind, fetch, is_hub_name
from services.preflight.memory import critic_workload, planned_of, weights_apart
from services.preflight.model import ModelFacts, read_facts, read_model
from services.settings.automatic import ENGINE_ONLY_SHARE, Machine
from services.settings.load import load_settings
from services.settings.sections import Settings
from trainer.config import ParallelConfig
from trainer.fsdp.layout import TENSOR_SIZE
from trainer.fsdp.memory.expected import ShardedWorkload
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.memory.expected import Workload, parameters_of_stage
from trainer.megatron.memory.layouts import TENSOR_RANKS, FittingLayout, fitting_layouts
from trainer.memory.expected import GIB, ITEM_BYTES, TOKENS_STEP, USED_SHARE, largest_budget, refusal

ENGINE_OVERHEAD = 2 * GIB
"""Memory of an engine in addition to weights and cache: CUDA graphs, activations of a prompt."""
MAX_SHOWN_LAYOUTS = 6
"""Maximum number of layouts printed."""


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """Memory on one GPU of an engine, bytes."""

    tensor_ranks: int
    memory_fraction: float
    """Value of `engine.memory_fraction` that leaves room for the staging copy."""
    weights: int
    """Bytes of the live parameters and the staging copy."""
    cache: int
    """Bytes of the KV cache; at most 0 if the engine does not fit."""
    token: int
    """Bytes of the KV cache per token."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the cache."""
        return max(0, self.cache) // self.token


@dataclass(frozen=True, slots=True)
class Sizes:
    """Result of `tether size`."""

    model: str
    parameters: int
    gpus: int
    gpu_gb: float
    sample_tokens: int
    """Tokens of the longest sample, including its prompt."""
    critic_apart: int
    """Expected peak memory in bytes of a critic rank on its own GPUs, with the smallest budget; 0 if the
    critic has no GPUs of its own."""
    apart: dict[str, int]
    """Role of a model with separate ranks -> bytes of weights on each of its GPUs."""
    layouts: Sequence[FittingLayout]
    engines: Sequence[EngineRoom]
    remedy: str
    """Why no layout fits, and a remedy; empty if a layout fits."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON types; memory in bytes."""
        engines = [dataclasses.asdict(room) | {"tokens": room.tokens} for room in self.engines]
        return dataclasses.asdict(self) | {"engines": engines}


def size_run(config: str, overrides: Sequence[str], *, gpus: int, gpu_gb: float) -> Sizes:
    """Return the layouts and engines that fit.

    Args:
        config: settings file.
        overrides: overrides of the form `A.B=C`.
        gpus: number of trainer GPUs, including those of `[placement]`.
        gpu_gb: memory of one GPU, GiB.

    Raises:
        SettingsError: a setting is wrong, the trainer does not support the model, a file cannot be read, or
            the layout does not divide the GPUs.
    """
    machine = Machine([str(number) for number in range(gpus)], bfloat16=True)  # not this machine
    settings = load_settings(config, overrides, machine=machine)
    ranks, room = _policy_ranks(settings, gpus), gpu_gb * GIB * USED_SHARE
    model = read_model(settings) if settings.trainer.backend == "fsdp" else _configuration(settings)
    work = planned_of(settings, model)
    layouts: list[FittingLayout] = []
    engines: list[EngineRoom] = []
    if isinstance(work, Workload):
        parameters = parameters_of_stage(dataclasses.replace(work, parallel=ParallelConfig()), 0)
        layouts = fitting_layouts(work, ranks, int(gpu_gb * GIB), settings.context_tokens)
        engines += _engine_rooms(settings, parameters, work.architecture, int(gpu_gb * GIB))
    elif isinstance(work, ShardedWorkload):
        parameters = work.model.whole  # the engine's sizes cannot be computed
        tensor_ranks = settings.parallel.tensor_model_parallel_size
        parallel = ParallelConfig(
            data_parallel_size=ranks // tensor_ranks, tensor_model_parallel_size=tensor_ranks
        )
        work = dataclasses.replace(work, parallel=parallel)
        if (tokens := largest_budget(work, room)) >= settings.context_tokens:
            layouts = [FittingLayout(parallel, tokens, work.expected(tokens))]
    else:
        raise SettingsError(
            "setting trainer.backend: 'fsdp' computes sizes from the model's files, which are yet to be made"
        )
    critic = critic_workload(settings, model).expected(TOKENS_STEP).peak if settings.placement.critic else 0
    return Sizes(
        model=settings.model.path or "[model.scratch]",
        parameters=parameters,
        gpus=gpus,
        gpu_gb=gpu_gb,
        sample_tokens=settings.context_tokens,
        critic_apart=critic,
        apart=weights_apart(settings, work),
        layouts=layouts,
        engines=engines,
        remedy="" if layouts else refusal(work, room),
    )


def _policy_ranks(settings: Settings, gpus: int) -> int:
    """Return the number of trainer GPUs for the policy.

    Raises:
        SettingsError: `[placement]` leaves no GPU, the tensor-parallel size does not divide them, or the
            backend has no layouts.
    """
    backend, placed = settings.trainer.backend, settings.placement.total
    if backend not in ("megatron", "fsdp"):
        raise SettingsError(f"setting trainer.backend: {backend!r} has no layouts: use megatron or fsdp")
    if placed >= gpus:
        raise SettingsError(
            f"section [placement]: it takes {placed} GPUs of the trainer's {gpus}, and leaves none to the "
            "policy; give --gpus more, or place fewer"
        )
    ranks, tensor_ranks = gpus - placed, settings.parallel.tensor_model_parallel_size
    if backend == "fsdp" and ranks % tensor_ranks:
        raise SettingsError(
            f"setting {TENSOR_SIZE}: {tensor_ranks}: it does not divide the policy's {ranks} GPUs"
        )
    return ranks


def _configuration(settings: Settings) -> ModelFacts:
    """Return the model's facts without its weights, which may be absent from this host.

    Raises:
        SettingsError: config.json cannot be read or downloaded.
    """
    name = settings.model.path
    if settings.model.scratch is None and is_hub_name(name):
        return read_facts(fetch(Kind.MODEL, name, settings.model.revision, ("config.json",)))
    return read_model(settings)


def cache_bytes(architecture: Architecture, item: int, tensor_ranks: int) -> int:
    """Return the KV cache of one token on one rank, bytes; sliding-window layers count in full."""
    layers = architecture.layers - len(architecture.delta.layers if architecture.delta else ())
    if low := architecture.latent:  # each rank stores the whole compressed vector
        return layers * (low.kv_rank + low.rope) * item
    heads = max(1, architecture.kv_heads // tensor_ranks)
    return layers * heads * (architecture.head_dim + architecture.value_dim) * item


def _engine_rooms(
    settings: Settings, parameters: int, architecture: Architecture, gpu_bytes: int
) -> Iterator[EngineRoom]:
    item = ITEM_BYTES[settings.engine.dtype]
    for ranks in TENSOR_RANKS:
        if architecture.heads % ranks:
            continue
        weights = parameters * item // ranks
        staged = 0 if settings.lora.rank else weights
        fraction = min(ENGINE_ONLY_SHARE, floor(100 * (1 - (staged + ENGINE_OVERHEAD) / gpu_bytes)) / 100)
        cache = int(gpu_bytes * fraction) - weights - ENGINE_OVERHEAD
        yield EngineRoom(ranks, fraction, weights + staged, cache, cache_bytes(architecture, item, ranks))


def render_sizes(sizes: Sizes) -> str:
    """Format the result as text."""
    lines = [
        f"model    {sizes.model}: {sizes.parameters:,} parameters; samples of at most "
        f"{sizes.sample_tokens:,} tokens",
        f"trainer  {sizes.gpus} GPU(s) of {sizes.gpu_gb:g} GiB"
        + (f": {sizes.remedy}" if sizes.remedy else ", layouts that fit, the fewest ranks a model first:"),
    ]
    if sizes.layouts:
        lines.append(f"  {'TP':>3} {'PP':>3} {'CP':>3} {'EP':>3} {'DP':>3}  micro-batch  expected peak")
    for layout in sizes.layouts[:MAX_SHOWN_LAYOUTS]:
        p = layout.parallel
        ranks = (
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            p.context_parallel_size,
            p.expert_model_parallel_size,
            p.data_parallel_size,
        )
        numbers = " ".join(f"{number:>3}" for number in ranks)
        lines.append(f"  {numbers}  {layout.tokens:>7,} tok  {layout.memory}")
    for role, held in sizes.apart.items():
        lines.append(f"{role:<8} on GPUs of its own: weights {held / GIB:.1f} GiB a GPU")
    if sizes.critic_apart:
        peak = sizes.critic_apart / GIB
        lines.append(f"critic   on GPUs of its own: peak {peak:.1f} GiB a GPU at {TOKENS_STEP:,} tokens")
    if sizes.engines:
        lines.append("engine   with its staging copy, by its tensor ranks:")
    for room in sizes.engines:
        lines.append(f"  {_engine_line(room, sizes.sample_tokens)}")
    return "\n".join(lines)


def _engine_line(room: EngineRoom, sample_tokens: int) -> str:
    weights = f"TP {room.tensor_ranks}: weights {room.weights / GIB:.1f} GiB a GPU"
    if room.tokens < sample_tokens:
        return f"{weights}; does not fit"
    return (
        f"{weights}, memory_fraction {room.memory_fraction:g}, cache {room.cache / GIB:.1f} GiB "
        f"= {room.tokens:,} tokens, {room.tokens // sample_tokens:,} samples of full length at once"
    )
