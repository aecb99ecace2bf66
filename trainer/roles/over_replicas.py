"""Puts together what the replicas have of a batch."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer.backends.rank_commands import control_device, is_distributed


def of_all_replicas(values: torch.Tensor, replicas: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the values of all replicas, one after the other, on every rank. A collective.

    Args:
        values: float32 [k] on the CPU, alike on all ranks of a replica; k differs between replicas.
        replicas: ranks of each replica.
    """
    if not is_distributed():
        return values
    own = next(number for number, ranks in enumerate(replicas) if dist.get_rank() in ranks)
    speaks = dist.get_rank() == replicas[own][0]
    counts = torch.zeros(len(replicas), dtype=torch.int64, device=control_device())
    counts[own] = len(values) if speaks else 0
    dist.all_reduce(counts)
    ends = counts.cumsum(0).tolist()
    whole = torch.zeros(ends[-1], dtype=torch.float32, device=control_device())
    if speaks:
        whole[ends[own] - len(values) : ends[own]] = values.to(whole.device)
    dist.all_reduce(whole)
    return whole.cpu()
