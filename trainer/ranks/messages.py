"""Sends messages of rank 0 to every other rank, which wait for them on the host.

A broadcast over NCCL would be a kernel that runs until the message comes, on a GPU that engines may share.
Ranks on GPUs therefore receive messages from torchrun's store.
"""

from typing import Any

import torch
import torch.distributed as dist

from trainer.ranks.collectives import control_device, is_distributed

QUEUE = "tether/commands/"
"""Key of a rank's queue in the store, before its number."""


def broadcast_message(data: bytes) -> None:
    """Send a message from rank 0 to every other rank. Without other ranks this does nothing."""
    if not is_distributed():
        return
    if control_device().type == "cuda":
        queue_for_others(data)
        return
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(torch.tensor([message.numel()], dtype=torch.int64), src=0)
    dist.broadcast(message, src=0)


def next_message() -> bytes:
    """Wait for the next message, on a rank other than 0; at most the process group's timeout."""
    if control_device().type == "cuda":
        return next_queued()
    size = torch.empty(1, dtype=torch.int64)
    dist.broadcast(size, src=0)
    data = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return data.numpy().tobytes()


def queue_for_others(data: bytes) -> None:
    """Queue a message of rank 0 for each other rank, in the store where the ranks have met."""
    store = _store()
    for rank in range(1, dist.get_world_size()):
        store.queue_push(f"{QUEUE}{rank}", data)


def next_queued() -> bytes:
    """Wait for the next message of `queue_for_others`, in order, on a rank other than 0.

    Raises:
        RuntimeError: no message comes within the process group's timeout, or the store's host has ended.
    """
    # by a connection of its own: meanwhile NCCL's threads use the process's
    data: bytes = _store().clone().queue_pop(f"{QUEUE}{dist.get_rank()}")
    return data


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
