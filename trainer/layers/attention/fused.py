"""Calls kernels that compute attention over packed sequences in one launch, on CUDA in 16 bits.

flash-attn and TransformerEngine are used where `trainer.attention_backend` says so; no test here runs either.

Shapes: q [T, heads, D]; k and v [C T, kv heads, D], of C context ranks; all return [T, heads, D]. Where a
sequence has more keys than queries, its last query belongs to its last key. The kernels count a window's
tokens without the query's own, and take -1 for all.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch

from trainer.layers.attention.joined import joined_attention, seen_rows
from trainer.layers.attention.sequences import PackedSequences
from trainer.layers.attention.terms import AttentionTerms
from trainer.layers.attention.visible import SharedKeys


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
        seen_rows(k, sequences.keys),
        seen_rows(v, sequences.keys),
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
        seen_rows(k, sequences.keys),
        seen_rows(v, sequences.keys),
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

    if sinks is not None or sequences.keys is not None:
        keys = sequences.keys
        shared = [_whole_part(call, terms) for call in keys.shared] if keys else []
        return joined_attention(q, k, v, keys, _causal_part(sequences, terms), shared, sinks)
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


@dataclass(frozen=True, slots=True)
class VarlenPart:
    """Attention within sequences by torch's own kernel; see `joined.Part`."""

    offsets: torch.Tensor
    """int32 [S + 1], on the device: where the queries of each sequence begin."""
    key_offsets: torch.Tensor
    longest: int
    longest_keys: int
    causal: bool
    scale: float | None
    window: int = 0

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output and log-sum-exp."""
        causal, scale, window = self._options
        out, total, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *self._places, causal, scale, window)
        return out, total

    def backward(
        self,
        out_grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients."""
        causal, scale, window = self._options
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn_backward(
            out_grad, q, k, v, out, total, *self._places, causal, no_dropout, scale, window
        )
        return found

    @property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.offsets, self.key_offsets, self.longest, self.longest_keys

    @property
    def _options(self) -> tuple[bool, float | None, list[int]]:
        if not self.causal:
            return False, self.scale, [-1, -1]
        return not self.window, self.scale, [self.window - 1, 0]


def _causal_part(sequences: PackedSequences, terms: AttentionTerms) -> VarlenPart:
    """Return causal attention of a micro-batch's sequences to their own keys."""
    offsets = sequences.offsets, sequences.key_offsets
    return VarlenPart(*offsets, sequences.longest, sequences.longest_keys, True, terms.scale, terms.window)


def _whole_part(call: SharedKeys, terms: AttentionTerms) -> VarlenPart:
    """Return attention of each query to all keys of its sequence."""
    longest, longest_keys = map(max, zip(*call.sizes, strict=True))
    return VarlenPart(call.query_offsets, call.key_offsets, longest, longest_keys, False, terms.scale)


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
