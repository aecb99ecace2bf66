"""Gathers the keys and values that a context rank sees, so that its queries can attend to them.

Each rank has the queries of its pieces of sequences. It gathers keys and values of all ranks and lays out the
visible ones of each piece, so that a kernel takes pieces as it takes sequences: with more keys than queries,
whose last keys belong to the queries. Keys and values are few compared with the queries that share them, so
they are gathered whole; none is handed around in a ring, which would take less memory and more messages.

Shapes: T tokens of this rank; K keys that its pieces see together; D head size.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from trainer.megatron.layers.attention.visible import VisibleKeys


def gather_visible(
    key: torch.Tensor, value: torch.Tensor, keys: VisibleKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values that this rank's pieces see. A collective of the context ranks.

    Both go in one message. In the backward pass their gradients are added up over the ranks that saw them.

    Args:
        key: [T, kv heads, D], of this rank's tokens, with rotation.
        value: [T, kv heads, any size], of this rank's tokens.
        keys: the visible ones.

    Returns:
        Keys [K, kv heads, D] and values [K, kv heads, any size].
    """
    both = gather_from_sequence_parallel_region(
        torch.cat([key, value], -1), group=mpu.get_context_parallel_group()
    )
    # Two pieces of a rank at most see a key, so its gradient does not depend on the order of adding.
    seen = both.index_select(0, keys.tokens)
    return seen[..., : key.size(-1)], seen[..., key.size(-1) :]


def spread_queries(query: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
    """Return queries [T, heads, D] among rows of zeros, [K, heads, D]: each where its token's key is.

    For kernels that take as many queries as keys; `keys.queries` picks the rows of the result.
    """
    rows = query.new_zeros(len(keys.tokens), *query.shape[1:])
    return rows.index_copy(0, keys.queries, query)


def sum_over_context_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of every context rank's array; every rank's use of it adds to the gradients of all."""
    group = mpu.get_context_parallel_group()
    mine = copy_to_tensor_model_parallel_region(values, group)
    total: torch.Tensor = reduce_from_tensor_model_parallel_region(mine, group)
    return total
