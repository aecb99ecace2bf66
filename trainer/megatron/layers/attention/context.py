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
import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


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


def sum_over_context_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of every context rank's array; every rank's use of it adds to the gradients of all."""
    group = mpu.get_context_parallel_group()
    mine = copy_to_tensor_model_parallel_region(values, group)
    total: torch.Tensor = reduce_from_tensor_model_parallel_region(mine, group)
    return total
