"""Makes and multiplies stacks: the matrices of a rank's experts in one parameter.

Shapes: L experts of a rank; R rows, sorted by expert.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


def stack(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter of experts.

    The mark makes megatron add up its gradients over the ranks with the same experts, and step it apart.
    """
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    parameter.allreduce = False  # type: ignore[attr-defined]
    return parameter


def linear(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply the rows [R, n] of each expert with its matrix of [L, m, n]; returns [R, m]."""
    if rows.is_cuda and rows.dtype is torch.bfloat16:
        ends = counts.to(rows.device, non_blocking=True).cumsum(0).int()
        product: torch.Tensor = torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        return product
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])
