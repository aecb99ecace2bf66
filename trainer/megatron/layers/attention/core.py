"""Chooses how attention over packed sequences is computed, and makes it the core of megatron's layers.

Shapes: T tokens, D head size; heads are those of this tensor rank.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.megatron.layers.attention import fused
from trainer.megatron.layers.attention.context import gather_visible, spread_queries
from trainer.megatron.layers.attention.rotary import rotate
from trainer.megatron.layers.attention.segmented import segmented_attention
from trainer.megatron.layers.attention.sequences import PackedSequences
from trainer.megatron.layers.attention.terms import AttentionTerms

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedSequences, AttentionTerms], torch.Tensor]
"""(q [T, heads, D], k [T, kv heads, D], v like k, sequences, terms) -> [T, heads, D]; causal within each
sequence. With context parallelism `sequences.keys` says which keys there are, more than T."""


def by_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute it with torch's attention, a segment at a time: anywhere, and what the others must equal."""
    if (keys := sequences.keys) is not None:
        q = spread_queries(q, keys)
    out = segmented_attention(q, k, v, sequences.segments, terms.scale, terms.window)
    return out if keys is None else out.index_select(0, keys.queries)


FUSED: dict[str, Kernel] = {
    "flash_attn": fused.flash_attention,
    "transformer_engine": fused.transformer_engine_attention,
    "torch.nn.attention.varlen": fused.varlen_attention,
}
"""Module -> the kernel that needs it, the preferred one first."""


@functools.cache
def kernel_for(device_type: str, dtype: torch.dtype) -> Kernel:
    """Return the first fused kernel whose module is there, on CUDA in 16 bits; else `by_segments`."""
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        for module, kernel in FUSED.items():
            if find_spec(module.partition(".")[0]) is not None and find_spec(module) is not None:
                return kernel
    return by_segments


class PackedAttention(MegatronModule):
    """Attention of a training layer; it also rotates queries and keys, so that recomputing it keeps less."""

    def __init__(self, config: TransformerConfig, terms: AttentionTerms, **unused: Any) -> None:
        super().__init__(config=config)
        self.terms = terms

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> torch.Tensor:
        """Map queries [T, heads, D], keys and values [T, kv heads, D] to [T, heads, D]."""
        kernel = kernel_for(query.device.type, query.dtype)
        query, key = rotate(query, key, packed_seq_params.cos, packed_seq_params.sin)
        if (keys := packed_seq_params.keys) is not None:
            key, value = gather_visible(key, value, keys)
        return kernel(query, key, value, packed_seq_params, self.terms)
