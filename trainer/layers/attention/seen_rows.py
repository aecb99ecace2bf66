"""Copies the keys and values that stretches see, so that a kernel takes stretches as it takes sequences.

Shapes: C context ranks; T tokens of this rank; K keys that its pieces see together; D head size.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainer.layers.attention.visible import VisibleKeys


def seen_rows(rows: torch.Tensor, keys: VisibleKeys | None) -> torch.Tensor:
    """Return of the gathered rows [C T, heads, any size] those that pieces see, [K, heads, any size]."""
    if keys is None or keys.tokens is None:
        return rows
    seen: torch.Tensor = _Seen.apply(rows, keys)
    return seen


def add_copies(gradient: torch.Tensor, keys: VisibleKeys | None, rows: int) -> torch.Tensor:
    """Return the gradient of `rows` gathered rows, from the gradient of the rows that pieces see, [K, ...].

    Gradients of copies are added up in float32 or wider, always in the same order.
    """
    if keys is None or keys.tokens is None:
        return gradient
    total = gradient.new_zeros(rows, *gradient.shape[1:])
    exact = torch.promote_types(gradient.dtype, torch.float32)
    for chosen, copies in keys.copies:
        found = gradient.index_select(0, copies.flatten())
        if copies.size(1) > 1:
            found = found.unflatten(0, copies.shape).sum(1, dtype=exact).to(gradient.dtype)
        total.index_copy_(0, chosen, found)
    return total


class _Seen(torch.autograd.Function):
    """Copies of rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
        ctx.keys, ctx.rows = keys, len(rows)
        assert keys.tokens is not None
        return rows.index_select(0, keys.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return add_copies(gradient, ctx.keys, ctx.rows), None


def spread_queries(query: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
    """Return queries [T, heads, D] among rows of zeros, [K, heads, D]: each where its token's key is.

    For kernels that take as many queries as keys; `keys.queries` picks the rows of the result.
    """
    rows = query.new_zeros(len(query) if keys.tokens is None else len(keys.tokens), *query.shape[1:])
    return rows.index_copy(0, keys.queries, query)
