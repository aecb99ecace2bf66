"""Tells tensors that are sharded over ranks from whole ones."""

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: its shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, on every rank. A collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
