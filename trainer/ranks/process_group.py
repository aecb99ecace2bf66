"""Makes the process group of the trainer's ranks."""

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others in a collective, unless the caller says otherwise."""


def join_ranks(
    device: torch.device,
    world: int,
    timeout_s: float = TIMEOUT_S,
    *,
    rank: int = 0,
    store: Any = None,
) -> bool:
    """Initialize torch.distributed: NCCL on a GPU, else gloo.

    Without a store the processes meet by torchrun's environment variables; a plain `python` is a world of
    one.

    Args:
        device: where this rank computes.
        world: number of ranks.
        timeout_s: seconds that a rank waits for the others in a collective.
        rank: of this process, with a store.
        store: in which these ranks alone meet; None: all processes of torchrun are ranks.

    Returns:
        Whether the group may be destroyed before the process exits. torchrun's store keeps the addresses of
        the first rendezvous, so a second one through it would wait forever.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    timeout = timedelta(seconds=timeout_s)
    if store is None and "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        atexit.register(_leave)
        return False
    alone = store is None
    if store is None:
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device_id
    )
    if not alone:
        atexit.register(_leave)
    return alone


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
