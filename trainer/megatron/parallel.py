"""Creates the process groups of a run: torch.distributed and megatron's parallel state."""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.megatron.layout import Layout, Place
from trainer.ranks.process_group import TIMEOUT_S, check_world, join_ranks, own_gpu

_initializing = threading.Lock()
"""Held while creating or destroying groups, because a trainer and an engine may start in two threads."""
_users = 0
_owns_torch = False


@dataclass(frozen=True, slots=True)
class Position:
    """Position of this process in the layout."""

    config: ParallelConfig
    device: torch.device
    place: Place

    @property
    def copy(self) -> int:
        """Index among the `copies`; the context rank varies faster than the data-parallel rank."""
        return self.place.cp + self.config.context_parallel_size * self.place.dp

    @property
    def copies(self) -> int:
        """Number of ranks with the same non-expert parameters, which share the optimizer's state."""
        return self.config.context_parallel_size * self.config.data_parallel_size

    @property
    def rank(self) -> int:
        """Global rank."""
        return sizes_of(self.config).rank_of(self.place.tp, self.place.pp, self.place.dp, self.place.cp)

    @property
    def first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.place.pp == self.config.pipeline_model_parallel_size - 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequences are split over the tensor ranks; False for one tensor rank."""
        return self.config.sequence_parallel and self.config.tensor_model_parallel_size > 1

    def replicas(self) -> list[list[int]]:
        """Return the global ranks of every data-parallel replica, ascending."""
        sizes = sizes_of(self.config)
        return [
            [
                sizes.rank_of(tp, pp, dp, cp)
                for pp in range(sizes.pp)
                for cp in range(sizes.cp)
                for tp in range(sizes.tp)
            ]
            for dp in range(sizes.dp)
        ]


def initialize(config: ParallelConfig, device: str, seed: int, timeout_s: float = TIMEOUT_S) -> Position:
    """Join the process groups of the layout. Several backends in one process share the groups.

    Under torchrun, processes find each other by environment variables. A plain `python` is a world of one
    rank.

    Args:
        config: parallel sizes.
        device: auto, cpu or cuda.
        seed: seed of megatron's CUDA random states.
        timeout_s: timeout of collectives in these groups, seconds.

    Raises:
        SettingsError: the layout does not fit the number of processes, or CUDA is requested but missing.
    """
    global _users, _owns_torch
    place, world = _device(device), check_world(config)
    sizes = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    experts = (config.expert_model_parallel_size, config.expert_tensor_parallel_size)
    with _initializing:
        if not dist.is_initialized():
            _owns_torch = join_ranks(place, world, timeout_s)
        if mpu.model_parallel_is_initialized():
            _check_layout((*sizes, *experts))
        else:
            mpu.initialize_model_parallel(
                *sizes[:2],
                context_parallel_size=sizes[2],
                expert_model_parallel_size=experts[0],
                expert_tensor_parallel_size=experts[1],
                create_gloo_process_groups=False,
                distributed_timeout_minutes=timeout_s / 60,
            )
            if place.type == "cuda":
                tensor_parallel.model_parallel_cuda_manual_seed(seed)
        _users += 1
    position = Position(config, place, sizes_of(config).place_of(dist.get_rank()))
    _check_order(position)
    return position


def sizes_of(config: ParallelConfig) -> Layout:
    """Return the layout with its sizes only, without layers."""
    stages = tuple((range(0),) for _ in range(config.pipeline_model_parallel_size))
    return Layout(
        config.tensor_model_parallel_size,
        config.context_parallel_size,
        config.data_parallel_size,
        config.expert_model_parallel_size,
        config.expert_tensor_parallel_size,
        stages,
    )


def _check_order(position: Position) -> None:
    """Check that megatron numbers ranks as `Layout` does."""
    theirs = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_context_parallel_rank(),
        mpu.get_data_parallel_rank(),
        mpu.get_data_parallel_rank(with_context_parallel=True),
        mpu.get_expert_model_parallel_rank(),
        mpu.get_expert_tensor_parallel_rank(),
    )
    place = position.place
    if theirs != (place.tp, place.pp, place.cp, place.dp, position.copy, place.ep, place.etp):
        raise RuntimeError(f"megatron-core puts rank {position.rank} at {theirs}, not at {position.place}")


def finalize() -> None:
    """Leave the process groups when the last backend of this process has closed."""
    global _users, _owns_torch
    with _initializing:
        _users -= 1
        if _users:
            return
        mpu.destroy_model_parallel()
        if _owns_torch:
            dist.destroy_process_group()
            _owns_torch = False


class GroupMember:
    """A model in the process groups."""

    _closed = False

    def close(self) -> None:
        """Leave the process groups. Idempotent."""
        if not self._closed:
            self._closed = True
            finalize()


def _check_layout(sizes: tuple[int, ...]) -> None:
    """Check that megatron's existing groups, from another backend of this process, have these sizes."""
    current = (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_context_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(),
        mpu.get_expert_tensor_parallel_world_size(),
    )
    if current != sizes:
        raise SettingsError(
            f"this process already has a layout (tensor, pipeline, context, expert, expert tensor) = "
            f"{current}, not {sizes}: close that backend first"
        )


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingsError("[trainer] device is cuda, but torch sees no CUDA device: use auto or cpu")
    if name == "cpu" and available:
        raise SettingsError(
            "[trainer] device is cpu, but megatron-core uses CUDA where there is one: hide it with "
            "CUDA_VISIBLE_DEVICES=''"
        )
    return own_gpu() if available else torch.device("cpu")
