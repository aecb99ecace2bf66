"""Divides the processes of the trainer between the policy and the models that have ranks of their own.

The ranks of each model are a world of their own to torch: its default process group has no other ranks, so
backends need not know of them. Rank 0 of the policy has a connection to the ranks of every other model.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainer.ranks.process_group import join_ranks
from trainer.ranks.wire import BetweenModels


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of a process among the processes of the trainer."""

    role: str
    """Model that it has alone; empty: it is a rank of the policy."""
    rank: int
    """Among the ranks of that model."""
    ranks: int
    """How many the model has."""


def seat_of(process: int, policy: int, apart: Mapping[str, int]) -> Seat:
    """Return the seat of a process: the policy has the first processes, and other models the next ones.

    Args:
        process: its number, from 0, as torchrun gives it.
        policy: ranks of the policy.
        apart: roles with ranks of their own -> how many.
    """
    rank = process
    for role, ranks in {"": policy, **apart}.items():
        if rank < ranks:
            return Seat(role, rank, ranks)
        rank -= ranks
    raise ValueError(f"process {process}: the trainer has {policy + sum(apart.values())}")


def take_seat(
    policy: int, apart: Mapping[str, int], *, on_gpu: bool, timeout_s: float
) -> Mapping[str, BetweenModels]:
    """Join the ranks of this process's model, under torchrun. Called once, on every process of the trainer.

    Args:
        policy: ranks of the policy.
        apart: roles with ranks of their own -> how many.
        on_gpu: whether it computes on the GPU with its local number.
        timeout_s: seconds that a rank waits for others.

    Returns:
        By role the connections of this rank: rank 0 of the policy has all of them, a rank of another model
        its own.
    """
    timeout = timedelta(seconds=timeout_s)
    store, process, _ = next(rendezvous("env://", timeout=timeout))
    seat = seat_of(process, policy, apart)
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    own = PrefixStore(f"tether/ranks/{seat.role or 'policy'}", store)
    join_ranks(device, seat.ranks, timeout_s, rank=seat.rank, store=own)
    links = {}
    for role, ranks in apart.items():
        if seat.role == role or (not seat.role and seat.rank == 0):
            place = seat.rank + 1 if seat.role else 0
            shared = PrefixStore(f"tether/between/{role}", store)
            links[role] = BetweenModels(dist.ProcessGroupGloo(shared, place, ranks + 1, timeout))
    return links
