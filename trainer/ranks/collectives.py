"""Exchanges small values and messages between the ranks of the trainer.

A message broadcast over NCCL would be a kernel that occupies a GPU, possibly shared with engines, until the
message arrives. Ranks on GPUs therefore receive messages on the host, from torchrun's store.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    """Return whether the process group has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_rank_0() -> bool:
    """Return whether this process is rank 0 or the only rank."""
    return not is_distributed() or dist.get_rank() == 0


def control_device() -> torch.device:
    """Return the device of tensors in communication between ranks."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def broadcast_bool(value: bool) -> bool:
    """Return rank 0's value on every rank. A collective."""
    decision = torch.tensor([int(value)], device=control_device())
    dist.broadcast(decision, src=0)
    return bool(decision.item())


def wait_for_ranks() -> None:
    """Wait until every rank has called this function. A collective."""
    device = control_device()
    # without a device, torch guesses it from the rank, and warns
    dist.barrier(device_ids=None if device.index is None else [device.index])


def batched_p2p(operation: Callable[..., object], values: torch.Tensor, rank: int) -> None:
    """Send or receive an array as a batch of one operation; block until done.

    NCCL runs batches in the communicator of all ranks. Otherwise it would create and keep a communicator per
    pair.

    Args:
        operation: `dist.isend` or `dist.irecv`.
        values: contiguous, on `control_device()`.
    """
    for work in dist.batch_isend_irecv([dist.P2POp(operation, values, rank)]):
        work.wait()


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the data of all ranks, by rank, on rank 0; an empty list on other ranks. A collective."""
    device = control_device()
    if dist.get_rank() != 0:
        batched_p2p(dist.isend, torch.tensor([len(data)], device=device), 0)
        if data:
            batched_p2p(dist.isend, torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), 0)
        return []
    gathered = [data]
    for rank in range(1, dist.get_world_size()):
        size = torch.empty(1, dtype=torch.int64, device=device)
        batched_p2p(dist.irecv, size, rank)
        part = torch.empty(int(size), dtype=torch.uint8, device=device)
        if len(part):
            batched_p2p(dist.irecv, part, rank)
        gathered.append(part.cpu().numpy().tobytes())
    return gathered


def sum_replicas(values: torch.Tensor, replicas: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the sum of the values of all replicas, on the CPU of every rank. A collective.

    Args:
        values: on the CPU, equal on all ranks of a replica; same shape in every replica.
    """
    if not is_distributed():
        return values
    speaks = any(ranks[0] == dist.get_rank() for ranks in replicas)
    total = (values.clone() if speaks else torch.zeros_like(values)).to(control_device())
    dist.all_reduce(total)
    return total.cpu()


def concatenate_replicas(values: torch.Tensor, replicas: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the concatenated values of all replicas, on the CPU of every rank. A collective.

    Args:
        values: [k] on the CPU, equal on all ranks of a replica; k may differ between replicas.
    """
    if not is_distributed():
        return values
    own, entries = _own_range(len(values), replicas)
    whole = values.new_zeros(entries)
    whole[own] = values
    return sum_replicas(whole, replicas)


def divide_over_replicas(
    values: torch.Tensor | None, entries: int, replicas: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return a replica's part of rank 0's float32 values, on the CPU of its ranks. A collective.

    Args:
        values: on rank 0: concatenated parts of all replicas, on the CPU; None on other ranks.
        entries: size of the replica's part.
    """
    if not is_distributed():
        assert values is not None  # this is rank 0
        return values
    own, total = _own_range(entries, replicas)
    whole = torch.empty(total) if values is None else values
    whole = whole.to(control_device())
    dist.broadcast(whole, src=0)
    return whole[own].cpu()


def _own_range(entries: int, replicas: Sequence[Sequence[int]]) -> tuple[slice, int]:
    """Return the range of this rank's replica, and the total number of entries. A collective."""
    own = next(number for number, ranks in enumerate(replicas) if dist.get_rank() in ranks)
    counts = torch.zeros(len(replicas), dtype=torch.int64)
    counts[own] = entries
    ends = sum_replicas(counts, replicas).cumsum(0).tolist()
    return slice(ends[own] - entries, ends[own]), ends[-1]


QUEUE = "tether/commands/"
"""Prefix of a rank's queue key in the store, followed by the rank."""


def broadcast_message(data: bytes) -> None:
    """Send a message from rank 0 to every other rank; no effect on a single rank."""
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
    """Queue a message of rank 0 for each other rank, in the store of the rendezvous."""
    store = _store()
    for rank in range(1, dist.get_world_size()):
        store.queue_push(f"{QUEUE}{rank}", data)


def next_queued() -> bytes:
    """Wait for the next message of `queue_for_others`, in order, on a rank other than 0.

    Raises:
        RuntimeError: no message arrives within the process group's timeout, or the store's host has ended.
    """
    # on a separate connection, because NCCL's threads use the process's connection
    data: bytes = _store().clone().queue_pop(f"{QUEUE}{dist.get_rank()}")
    return data


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
