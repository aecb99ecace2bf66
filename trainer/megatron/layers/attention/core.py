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
from trainer.megatron.layers.attention.segmented import segmented_attention
from trainer.megatron.layers.attention.sequences import PackedSequences
from trainer.megatron.layers.attention.terms import PLAIN, AttentionTerms

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedSequences, AttentionTerms], torch.Tensor]
"""(q [T, heads, D], k [T, kv heads, D], v like k, sequences, terms) -> [T, heads, D]; causal within each
sequence."""


def by_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute it with torch's attention, a segment at a time: anywhere, and what the others must equal."""
    return segmented_attention(q, k, v, sequences.segments, terms.scale, terms.window, terms.softcap)


FUSED: dict[str, Kernel] = {
    "flash_attn": fused.flash_attention,
    "transformer_engine": fused.transformer_engine_attention,
    "torch.nn.attention.varlen": fused.varlen_attention,
}
"""Module -> the kernel that needs it, the preferred one first."""
OPTIONAL: dict[str, frozenset[str]] = {"flash_attn": frozenset({"softcap"})}
"""Module -> terms that its kernel computes, of those that not every kernel does."""


@functools.cache
def kernel_for(device_type: str, dtype: torch.dtype, terms: AttentionTerms = PLAIN) -> Kernel:
    """Return the first fused kernel that is there and has the terms, on CUDA in 16 bits, or `by_segments`."""
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        for module, kernel in FUSED.items():
            computed = terms.optional <= OPTIONAL.get(module, frozenset())
            if computed and find_spec(module.partition(".")[0]) is not None and find_spec(module) is not None:
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
        kernel = kernel_for(query.device.type, query.dtype, self.terms)
        query, key = packed_seq_params.angles[self.terms.rope].rotate(query, key)
        return kernel(query, key, value, packed_seq_params, self.terms)
