"""Makes and multiplies stacks: the matrices of a rank's experts in one parameter.

Shapes: L experts of a rank; R rows, sorted by expert.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

ALIGNED = 8
"""Sizes of bfloat16 matrices that torch's grouped product takes are multiples of it: 16 bytes."""


def stack(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter of experts.

    The mark makes megatron add up its gradients over the ranks with the same experts, and step it apart.
    """
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    parameter.allreduce = False  # type: ignore[attr-defined]
    return parameter


def expert_products(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return [R, m]; on a GPU in bfloat16 by one kernel, elsewhere expert by expert.

    Args:
        rows: [R, n], sorted by expert.
        weights: [L, m, n].
        counts: int64 [L]: rows of each expert, on the host or on the device.
    """
    aligned = not any(size % ALIGNED for size in weights.shape[1:])
    if rows.is_cuda and rows.dtype is torch.bfloat16 and aligned:
        return grouped(rows, weights, counts)
    return one_by_one(rows, weights, counts)


def grouped(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute `expert_products` by torch's grouped product; the host does not wait for the device."""
    ends = counts.to(rows.device, non_blocking=True).cumsum(0).int()
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def one_by_one(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute `expert_products` with a product for each expert: what `grouped` must equal."""
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])
