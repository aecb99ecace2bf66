"""Passes small values between the ranks of the trainer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    """Return whether there is more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_rank_0() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return not is_distributed() or dist.get_rank() == 0


def control_device() -> torch.device:
    """Return the device of tensors that ranks send to each other."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def agreed(value: bool) -> bool:
    """Return the value that rank 0 gave, on every rank. A collective."""
    decision = torch.tensor([int(value)], device=control_device())
    dist.broadcast(decision, src=0)
    return bool(decision.item())


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the data of every rank, by rank, on rank 0; an empty list on the others. A collective."""
    device = control_device()
    if dist.get_rank() != 0:
        dist.send(torch.tensor([len(data)], device=device), 0)
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), 0)
        return []
    gathered = [data]
    for rank in range(1, dist.get_world_size()):
        size = torch.empty(1, dtype=torch.int64, device=device)
        dist.recv(size, rank)
        part = torch.empty(int(size), dtype=torch.uint8, device=device)
        if len(part):
            dist.recv(part, rank)
        gathered.append(part.cpu().numpy().tobytes())
    return gathered


def sum_replicas(values: torch.Tensor, replicas: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the sum of the values of all replicas, on the CPU of every rank. A collective.

    Args:
        values: on the CPU, equal on all ranks of a replica; the shape is the same in every replica.
        replicas: ranks of each replica.
    """
    if not is_distributed():
        return values
    speaks = any(ranks[0] == dist.get_rank() for ranks in replicas)
    total = (values.clone() if speaks else torch.zeros_like(values)).to(control_device())
    dist.all_reduce(total)
    return total.cpu()


def concatenate_replicas(values: torch.Tensor, replicas: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the values of all replicas, one after the other, on the CPU of every rank. A collective.

    Args:
        values: [k] on the CPU, equal on all ranks of a replica; k differs between replicas.
        replicas: ranks of each replica.
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
    """Return a replica's part of float32 values that rank 0 has, on the CPU of its ranks. A collective.

    Args:
        values: on rank 0 the parts of all replicas, one after the other, on the CPU; None on other ranks.
        entries: of the replica's part.
        replicas: ranks of each replica.
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
    """Return where this rank's replica has its entries, and how many all have together. A collective."""
    own = next(number for number, ranks in enumerate(replicas) if dist.get_rank() in ranks)
    counts = torch.zeros(len(replicas), dtype=torch.int64)
    counts[own] = entries
    ends = sum_replicas(counts, replicas).cumsum(0).tolist()
    return slice(ends[own] - entries, ends[own]), ends[-1]
