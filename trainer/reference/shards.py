"""Converts between sharded and whole tensors.

Ranks form a mesh of two dimensions. Tensor-parallel ranks split a tensor along one dimension. The dimension
may consist of several equal blocks, such as gates and inputs of experts in one parameter, and each block is
split. Data-parallel ranks split the rows of a tensor-parallel part.
"""

import torch
from torch.distributed.tensor import DTensor

DATA, TENSOR = "data", "tensor"
"""Names of the mesh dimensions."""
Cut = tuple[int, int]
"""Dimension along which tensor-parallel ranks split a tensor, and the number of blocks in it."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on every rank. A collective if the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_cut(tensor: torch.Tensor) -> Cut | None:
    """Return the split of a tensor over tensor-parallel ranks; None if it is replicated."""
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


def tensor_parallel_part(whole: torch.Tensor, cut: Cut | None, rank: int, ranks: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a whole tensor."""
    if cut is None:
        return whole
    dim, blocks = cut
    parts = whole.unflatten(dim, (blocks, ranks, whole.shape[dim] // (blocks * ranks)))
    return parts.select(dim + 1, rank).flatten(dim, dim + 1)


def joined(parts: list[torch.Tensor], cut: Cut | None) -> torch.Tensor:
    """Join the tensor-parallel ranks' parts to the whole tensor."""
    if cut is None:
        return parts[0]
    dim, blocks = cut
    apart = [part.unflatten(dim, (blocks, part.shape[dim] // blocks)) for part in parts]
    return torch.stack(apart, dim + 1).flatten(dim, dim + 2)


def replica_count(tensor: torch.Tensor, ranks: int, tensor_ranks: int) -> int:
    """Return the number of ranks that hold a copy of the same elements of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks
    return 1 if tensor_cut(tensor) else tensor_ranks
