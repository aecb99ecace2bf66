"""Copies the keys and values that stretches see, so that a kernel takes stretches as it takes sequences.

Shapes: C context ranks; T tokens of this rank; K keys that its pieces see together; D head size.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainer.layers.attention.visible import VisibleKeys


def seen_rows(rows: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
    """Return copies of the gathered rows [C T, heads, any size] for every piece that sees them, [K, ...]."""
    seen: torch.Tensor = _Seen.apply(rows, keys)
    return seen


class _Seen(torch.autograd.Function):
    """Copies of rows, whose gradients are added up in float32 or wider, always in the same order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
        ctx.keys, ctx.rows = keys, len(rows)
        return rows.index_select(0, keys.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        exact = torch.promote_types(gradient.dtype, torch.float32)
        for rows, copies in ctx.keys.copies:
            found = gradient.index_select(0, copies.flatten())
            if copies.size(1) > 1:
                found = found.unflatten(0, copies.shape).sum(1, dtype=exact).to(gradient.dtype)
            total.index_copy_(0, rows, found)
        return total, None


def spread_queries(query: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
    """Return queries [T, heads, D] among rows of zeros, [K, heads, D]: each where its token's key is.

    For kernels that take as many queries as keys; `keys.queries` picks the rows of the result.
    """
    rows = query.new_zeros(len(keys.tokens), *query.shape[1:])
    return rows.index_copy(0, keys.queries, query)
