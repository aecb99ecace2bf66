"""Calls kernels that compute attention over packed sequences in one launch, on CUDA in 16 bits.

flash-attn and TransformerEngine are used where they are installed; this project's own tests run neither.

Shapes: q [T, heads, D]; k and v [T, kv heads, D]; all return [T, heads, D]. The kernels count a window's
tokens without the query's own, and take -1 for all.
"""

import functools
import inspect
from typing import Any, cast

import torch

from trainer.megatron.layers.attention.sequences import PackedSequences
from trainer.megatron.layers.attention.terms import AttentionTerms


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute it with flash-attn."""
    from flash_attn import flash_attn_varlen_func

    offsets, longest = sequences.offsets, sequences.longest
    out: torch.Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        softmax_scale=terms.scale,
        causal=True,
        window_size=(terms.window - 1, 0),
        softcap=terms.softcap,
    )
    return out


def transformer_engine_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute it with TransformerEngine."""
    out: torch.Tensor = _transformer_engine(q.size(1), k.size(1), q.size(2), terms)(
        q,
        k,
        v,
        cu_seqlens_q=sequences.offsets,
        cu_seqlens_kv=sequences.offsets,
        max_seqlen_q=sequences.longest,
        max_seqlen_kv=sequences.longest,
    )
    return out.view_as(q)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute it with torch's own kernel; older ones take grouped heads as they are."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {} if terms.scale is None else {"scale": terms.scale}
    if q.size(1) != k.size(1) and _varlen_asks_for_groups():
        options["enable_gqa"] = True
    offsets, longest, window = sequences.offsets, sequences.longest, (terms.window - 1, 0)
    found = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window, **options)
    return cast(torch.Tensor, found)  # a tuple only if more is asked for


@functools.cache
def _varlen_asks_for_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@functools.cache
def _transformer_engine(heads: int, kv_heads: int, head_dim: int, terms: AttentionTerms) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attn_mask_type="padding_causal",
        qkv_format="thd",
        softmax_scale=terms.scale,
        window_size=(terms.window - 1, 0),
    )
