"""Uses attention over packed sequences as the core attention of megatron's layers.

Shapes: T tokens, D size of a head's query and key, V size of its value, mostly V = D. Heads are the heads of
this tensor rank.

With shared prefixes or context parallelism, queries attend to keys at other positions or ranks. A rank
all-gathers keys and values of all context ranks. The keys are few compared with the queries that share them,
so whole keys are gathered. A ring would need less memory and more messages.
"""

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.attention.kernels import packed_attention
from trainer.layers.attention.terms import AttentionTerms
from trainer.megatron.layers.attention.rotary import RotarySequences
from trainer.megatron.layers.tensor_parallel import empty_parameter

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


def gather_keys(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather keys and values over the context ranks, ordered by rank. A collective of the context ranks.

    Keys and values share one message. The backward pass sums their gradients over the ranks.

    Args:
        key: [T, kv heads, D], rotated keys of this rank's tokens.
        value: [T, kv heads, any size], values of this rank's tokens.

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
    """Return the sum of an array over the context ranks; gradients of all ranks' uses are summed, too."""
    group = mpu.get_context_parallel_group()
    mine = copy_to_tensor_model_parallel_region(values, group)
    total: torch.Tensor = reduce_from_tensor_model_parallel_region(mine, group)
    return total


class PackedAttention(MegatronModule):
    """Core attention for training. Includes the rotation, so recomputation stores less."""

    def __init__(self, config: TransformerConfig, terms: AttentionTerms, **unused: Any) -> None:
        super().__init__(config=config)
        self.terms = terms
        if terms.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = empty_parameter(config, heads)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: RotarySequences,
        **unused: Any,
    ) -> torch.Tensor:
        """Map queries [T, heads, D], keys [T, kv heads, D] and values [T, kv heads, V] to [T, heads, V]."""
        sequences = packed_seq_params.for_layer(self.terms)
        query, key = self.rotated(query, key, packed_seq_params)
        if sequences.keys is not None:
            key, value = gather_keys(key, value)
        sinks = self.sinks if self.terms.sinks else None
        return packed_attention(query, key, value, sequences, self.terms, sinks)

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, sequences: RotarySequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, rotated by position."""
        return sequences.angles[self.terms.rope].rotate(query, key)
