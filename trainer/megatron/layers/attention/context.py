"""Gathers the keys and values that queries see which have not all of theirs, so that they can attend to them.

These are queries of stretches behind a shared one, and of the pieces of context parallelism. A rank
gathers keys and values of all context ranks. Where pieces do not attend to those before them apart, it lays
out the visible ones of each piece, so that a kernel takes pieces as it takes sequences: with more keys than
queries, whose last keys belong to the queries. Keys and values are few compared with the queries that share
them, so they are gathered whole; none is handed around in a ring, which would take less memory and more
messages.

Shapes: C context ranks; T tokens of this rank; K keys that its pieces see together; D head size.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch.autograd.function import once_differentiable

from trainer.megatron.layers.attention.visible import VisibleKeys


def gather_keys(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of all context ranks, rank by rank. A collective of these.

    Both go in one message. In the backward pass their gradients are added up over the ranks that saw them.

    Args:
        key: [T, kv heads, D], of this rank's tokens, with rotation.
        value: [T, kv heads, any size], of this rank's tokens.

    Returns:
        Keys [C T, kv heads, D] and values [C T, kv heads, any size].
    """
    if mpu.get_context_parallel_world_size() == 1:
        return key, value
    both = gather_from_sequence_parallel_region(
        torch.cat([key, value], -1), group=mpu.get_context_parallel_group()
    )
    key, value = both.split([key.size(-1), value.size(-1)], -1)
    return key, value


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


def sum_over_context_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of every context rank's array; every rank's use of it adds to the gradients of all."""
    group = mpu.get_context_parallel_group()
    mine = copy_to_tensor_model_parallel_region(values, group)
    total: torch.Tensor = reduce_from_tensor_model_parallel_region(mine, group)
    return total
