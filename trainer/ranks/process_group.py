"""Creates the process groups of the policy's ranks and of other models' ranks.

The ranks of each model form a separate torch world: their default process group has no other ranks, so
backends are independent of other models. Rank 0 of the policy has a connection to the ranks of every other
model.
"""

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.ranks.collectives import wait_for_ranks
from trainer.ranks.wire import BetweenModels

TIMEOUT_S = 600.0
"""Default timeout for the other ranks in a collective, seconds."""


def check_world(parallel: ParallelConfig) -> int:
    """Check the number of processes against the layout, and return it.

    Raises:
        SettingsError: the numbers differ.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.data_parallel_size,
    )
    if min(sizes) < 1 or world != parallel.world_size:
        raise SettingsError(
            f"[parallel] asks for {parallel.world_size} processes (tensor {sizes[0]} x pipeline {sizes[1]} x "
            f"context {sizes[2]} x data {sizes[3]}), but {world} are running: start the trainer with "
            f"torchrun --nproc-per-node {parallel.world_size}, or change the sizes"
        )
    return world


def own_gpu() -> torch.device:
    """Return this process's GPU, by local rank, and make it torch's current device."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join_ranks(
    device: torch.device,
    world: int,
    timeout_s: float = TIMEOUT_S,
    *,
    rank: int = 0,
    store: Any = None,
) -> bool:
    """Initialize torch.distributed: NCCL on a GPU, else gloo.

    Without a store, the processes meet by torchrun's environment variables; a plain `python` process is a
    world of one.

    torch gets no `device_id`. Otherwise each of Megatron's groups would have a communicator from the start,
    which takes half a GiB of the GPU even for a single rank. A barrier binds the GPU instead.

    Args:
        timeout_s: timeout for the other ranks in a collective, seconds.
        rank: rank of this process, with a store.
        store: rendezvous of exactly these ranks; None: all processes of torchrun are ranks.

    Returns:
        Whether the group may be destroyed before the process exits. torchrun's store keeps the addresses of
        the first rendezvous, so a second rendezvous would wait forever.
    """
    on_gpu = device.type == "cuda"
    backend, timeout = "nccl" if on_gpu else "gloo", timedelta(seconds=timeout_s)
    launched = store is None and "RANK" in os.environ
    alone = store is None and not launched
    if launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore() if alone else store  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    if on_gpu:
        wait_for_ranks()
    if not alone:
        atexit.register(_destroy_process_group)
    return alone


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Position of a process among the processes of the trainer."""

    role: str
    """Model on ranks of its own; empty: a rank of the policy."""
    rank: int
    """Rank within the model."""
    ranks: int
    """Number of ranks of the model."""


def rank_assignment(process: int, policy_ranks: int, remote_ranks: Mapping[str, int]) -> RankAssignment:
    """Return the assignment of a process: the policy has the first processes, other models the next ones.

    Args:
        process: index of the process, as set by torchrun.
        policy_ranks: number of ranks of the policy.
        remote_ranks: role with ranks of its own -> number of ranks.
    """
    rank = process
    for role, ranks in {"": policy_ranks, **remote_ranks}.items():
        if rank < ranks:
            return RankAssignment(role, rank, ranks)
        rank -= ranks
    raise ValueError(f"process {process}: the trainer has {policy_ranks + sum(remote_ranks.values())}")


def join_model_ranks(
    policy_ranks: int, remote_ranks: Mapping[str, int], *, on_gpu: bool, timeout_s: float
) -> Mapping[str, BetweenModels]:
    """Join the ranks of this process's model, under torchrun. Called once, on every process of the trainer.

    Args:
        remote_ranks: role with ranks of its own -> number of ranks.
        on_gpu: whether the process computes on the GPU of its local rank.

    Returns:
        Role -> connection of this rank. Rank 0 of the policy has all connections, a rank of another model its
        own.
    """
    timeout = timedelta(seconds=timeout_s)
    store, process, _ = next(rendezvous("env://", timeout=timeout))
    assignment = rank_assignment(process, policy_ranks, remote_ranks)
    device = own_gpu() if on_gpu else torch.device("cpu")
    own = PrefixStore(f"tether/ranks/{assignment.role or 'policy'}", store)
    join_ranks(device, assignment.ranks, timeout_s, rank=assignment.rank, store=own)
    links = {}
    for role, ranks in remote_ranks.items():
        if assignment.role == role or (not assignment.role and assignment.rank == 0):
            place = assignment.rank + 1 if assignment.role else 0
            shared = PrefixStore(f"tether/between/{role}", store)
            links[role] = BetweenModels(dist.ProcessGroupGloo(shared, place, ranks + 1, timeout))
    return links
