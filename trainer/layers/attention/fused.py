"""Calls kernels that compute attention over packed sequences in one launch, on CUDA in 16 bits.

flash-attn and TransformerEngine are used where `trainer.attention_backend` says so; no test here runs either.

Shapes: q [T, heads, D]; k and v [K, kv heads, D], K being T without context parallelism; all return
[T, heads, D]. Where a sequence has more keys than queries, its last query belongs to its last key. The
kernels count a window's tokens without the query's own, and take -1 for all.
"""

import functools
import inspect
from typing import Any, cast

import torch

from trainer.layers.attention.sequences import PackedSequences
from trainer.layers.attention.sinks import varlen_attention_with_sinks
from trainer.layers.attention.terms import AttentionTerms


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Compute it with flash-attn."""
    from flash_attn import flash_attn_varlen_func

    out: torch.Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        sequences.offsets,
        sequences.key_offsets,
        sequences.longest,
        sequences.longest_keys,
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
    mask = "padding_causal" if sequences.keys is None else "padding_causal_bottom_right"
    out: torch.Tensor = _transformer_engine(q.size(1), k.size(1), q.size(2), terms, mask)(
        q,
        k,
        v,
        cu_seqlens_q=sequences.offsets,
        cu_seqlens_kv=sequences.key_offsets,
        max_seqlen_q=sequences.longest,
        max_seqlen_kv=sequences.longest_keys,
    )
    return out.view_as(q)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute it with torch's own kernel; older ones take grouped heads as they are."""
    from torch.nn.attention.varlen import varlen_attn

    if sinks is not None:
        return varlen_attention_with_sinks(q, k, v, sequences, terms, sinks)
    options: dict[str, Any] = {} if terms.scale is None else {"scale": terms.scale}
    if q.size(1) != k.size(1) and _varlen_asks_for_groups():
        options["enable_gqa"] = True
    output = varlen_attn(
        q,
        k,
        v,
        sequences.offsets,
        sequences.key_offsets,
        sequences.longest,
        sequences.longest_keys,
        window_size=(terms.window - 1, 0),
        **options,
    )
    return cast(torch.Tensor, output)  # a tuple only if more is asked for


@functools.cache
def _varlen_asks_for_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@functools.cache
def _transformer_engine(heads: int, kv_heads: int, head_dim: int, terms: AttentionTerms, mask: str) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attn_mask_type=mask,
        qkv_format="thd",
        softmax_scale=terms.scale,
        window_size=(terms.window - 1, 0),
    )
