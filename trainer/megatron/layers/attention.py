"""Chooses how attention over packed sequences is computed, and makes it the core of megatron's layers.

A softcap or sinks would become fields of the layer that every kernel takes or refuses, as the sliding window
is; no supported model has them.

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

from trainer.megatron.layers import fused_attention
from trainer.megatron.layers.rotary import rotate
from trainer.megatron.layers.segmented import segmented_attention
from trainer.megatron.layers.sequences import PackedSequences

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PackedSequences, float | None, int], torch.Tensor
]
"""(q [T, heads, D], k [T, kv heads, D], v like k, sequences, scale of the scores, window) -> [T, heads, D];
causal within each sequence. Scale None: 1 / sqrt(D). Window: tokens that each one attends to, itself
included; 0: all before it."""


def by_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    scale: float | None,
    window: int,
) -> torch.Tensor:
    """Compute it with torch's attention, a segment at a time: anywhere, and what the others must equal."""
    return segmented_attention(q, k, v, sequences.segments, scale, window)


FUSED: dict[str, Kernel] = {
    "flash_attn": fused_attention.flash_attention,
    "transformer_engine": fused_attention.transformer_engine_attention,
    "torch.nn.attention.varlen": fused_attention.varlen_attention,
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


def window_of(config: TransformerConfig) -> int:
    """Return the sliding window of a model, 0 for none; megatron counts it without the query's own token."""
    return config.window_size[0] + 1 if config.window_size else 0


class PackedAttention(MegatronModule):
    """Attention of a training layer; it also rotates queries and keys, so that recomputing it keeps less."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.window = window_of(config)

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
        return kernel(query, key, value, packed_seq_params, self.softmax_scale, self.window)
