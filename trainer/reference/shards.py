"""Tells tensors that are sharded over ranks from whole ones.

Ranks are a mesh of two dimensions. A tensor-parallel rank has a part of a tensor along one dimension: of each
of several equal blocks that lie there, such as gates and inputs of experts that are one parameter. The
data-parallel ranks divide this part's rows.
"""

import torch
from torch.distributed.tensor import DTensor

DATA, TENSOR = "data", "tensor"
"""Names of the dimensions of a mesh."""
Cut = tuple[int, int]
"""The dimension along which tensor-parallel ranks divide a tensor, and the blocks there."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: its shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, on every rank. A collective for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_cut(tensor: torch.Tensor) -> Cut | None:
    """Return how tensor-parallel ranks divide a tensor; None: each has it whole."""
    names = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
    if not isinstance(tensor, DTensor) or TENSOR not in names:
        return None
    placement = tensor.placements[names.index(TENSOR)]
    if placement.is_replicate():
        return None
    return placement.dim % tensor.ndim, getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]


def part_shape(tensor: torch.Tensor, ranks: int) -> tuple[int, ...]:
    """Return the shape of a tensor-parallel rank's part of a tensor."""
    shape = list(tensor.shape)
    if cut := tensor_cut(tensor):
        shape[cut[0]] //= ranks
    return tuple(shape)


def part_of(whole: torch.Tensor, cut: Cut | None, rank: int, ranks: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a whole tensor."""
    if cut is None:
        return whole
    dim, blocks = cut
    parts = whole.unflatten(dim, (blocks, ranks, whole.shape[dim] // (blocks * ranks)))
    return parts.select(dim + 1, rank).flatten(dim, dim + 1)


def joined(parts: list[torch.Tensor], cut: Cut | None) -> torch.Tensor:
    """Return the whole tensor of the tensor-parallel ranks' parts."""
    if cut is None:
        return parts[0]
    dim, blocks = cut
    apart = [part.unflatten(dim, (blocks, part.shape[dim] // blocks)) for part in parts]
    return torch.stack(apart, dim + 1).flatten(dim, dim + 2)


def copies_of(tensor: torch.Tensor, ranks: int, tensor_ranks: int) -> int:
    """Return on how many of all ranks the same elements of a tensor are."""
    if not isinstance(tensor, DTensor):
        return ranks
    return 1 if tensor_cut(tensor) else tensor_ranks
