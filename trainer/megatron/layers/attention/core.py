"""Makes attention over packed sequences the core of megatron's layers.

Shapes: T tokens, D size of a head's query and key, V of its value, mostly the same; heads are this tensor
rank's.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.attention.kernels import packed_attention
from trainer.layers.attention.terms import AttentionTerms
from trainer.megatron.layers.attention.context import gather_keys
from trainer.megatron.layers.attention.sequences import RotarySequences


class PackedAttention(MegatronModule):
    """Attention of a training layer; it also rotates queries and keys, so that recomputing it keeps less."""

    def __init__(self, config: TransformerConfig, terms: AttentionTerms, **unused: Any) -> None:
        super().__init__(config=config)
        self.terms = terms
        if terms.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))

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
        """Return queries and keys rotated for their positions."""
        return sequences.angles[self.terms.rope].rotate(query, key)
