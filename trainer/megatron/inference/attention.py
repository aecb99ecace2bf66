"""Attends to keys and values in the pages of a `PagedCache`.

Shapes: S tokens of each of N sequences in a prefill, one token of each of B sequences in a decode step; W
tokens in the pages of the longest sequence; D size of a head's query and key, V size of its value.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention

from trainer.layers.attention.segmented import causal_attention
from trainer.layers.attention.softcapped import softcapped_attention
from trainer.megatron.inference.cache import PagedCache
from trainer.megatron.layers.attention.core import PackedAttention
from trainer.megatron.layers.attention.latent import LatentAttention
from trainer.megatron.layers.lora import adapted_weight


class CachedSelfAttention(SelfAttention):
    """Self-attention that rotates queries and keys before storing the keys."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: dict[int, torch.Tensor] | None = None,
        *,
        inference_context: PagedCache,
        **unused: Any,
    ) -> Any:
        """Map [S, N, H] to the same shape; return the output and the projection's bias, or None."""
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query, key = inference_context.angles[self.core_attention.terms.rope].rotate(query, key)
        keys, values = inference_context.store(self.layer_number, key, value)
        return self.linear_proj(self.core_attention(query, keys, values, attention_mask))


class CachedCore(PackedAttention):
    """Core attention of the training layer, with its parameters, over right-padded sequences.

    In a prefill, causality excludes the padding without a mask.
    """

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: dict[int, torch.Tensor] | None,
        **unused: Any,
    ) -> torch.Tensor:
        """Map [S, N, heads, D] to [S, N, heads * D].

        Args:
            query: heads of this tensor rank; [1, B, heads, D] in a decode step.
            key: [B, W, kv heads, D] in a decode step, otherwise like `query`, with fewer heads if grouped.
            value: [..., V] with the leading dimensions of `key`.
            attention_mask: None for causal attention. In a decode step, window -> bias [B, 1, 1, W], see
                `PagedCache.biases`.
        """
        terms, sinks = self.terms, self.sinks if self.terms.sinks else None
        if attention_mask is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = causal_attention(q, k, v, terms.scale, terms.window, terms.softcap, sinks)
            return out.permute(2, 0, 1, 3).flatten(2)
        # The query heads of a group attend like the tokens of a sequence, which avoids one copy of the keys
        # per head.
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        grouped_queries = query.reshape(*k.shape[:2], -1, query.size(3))
        bias = attention_mask[terms.window]
        if terms.softcap:
            seen = bias[:, None] == 0
            out = softcapped_attention(
                grouped_queries, k, v, scale=terms.scale, softcap=terms.softcap, mask=seen
            )
            return out.flatten(1)[None]
        if sinks is not None:
            # A sink is equivalent to a key with the given score and a zero value.
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            bias = _with_sinks(bias, sinks.to(bias.dtype).view(1, k.size(1), -1, 1))
        out = F.scaled_dot_product_attention(grouped_queries, k, v, attn_mask=bias, scale=terms.scale)
        return out.flatten(1)[None]


class CachedLatentAttention(LatentAttention):
    """Multi-head latent attention whose cache stores the low-rank vector, then the key's rotated part.

    A decode step attends directly to the stored vectors, as one key head shared by all heads. The matrix that
    expands vectors to keys is applied to the queries, and the matrix for values to the result.
    """

    def __init__(self, config: Any, *, layer_number: int, **others: Any) -> None:
        super().__init__(config, **others)
        self.layer_number = layer_number

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: dict[int, torch.Tensor] | None = None,
        *,
        inference_context: PagedCache,
        **unused: Any,
    ) -> Any:
        """Map [S, N, H] to the same shape; return the output and None, megatron's convention without bias."""
        sizes, shape = self.latent, hidden_states.shape[:2]
        queries = self._queries(hidden_states.flatten(0, 1)[:, None]).unflatten(0, shape)
        plain, rotated = queries.split([sizes.nope, sizes.rope], dim=-1)
        low, positioned = self.linear_kv_down_proj(hidden_states).split([sizes.kv_rank, sizes.rope], dim=-1)
        low = self.kv_layernorm(low)[:, :, None]
        rotated, positioned = inference_context.angles[self.core_attention.terms.rope].rotate(
            rotated, positioned[:, :, None]
        )
        factor = self.core_attention.rotary_factor
        rotated, positioned = rotated * factor, positioned * factor
        (kept,) = inference_context.store(self.layer_number, torch.cat([low, positioned], dim=-1))
        if attention_mask is None:
            out = self._prefill(torch.cat([plain, rotated], dim=-1), low, positioned)
        else:
            out = self._decode(plain, rotated, kept, attention_mask[self.core_attention.terms.window])
        return self.linear_proj(out)

    def _prefill(self, queries: torch.Tensor, low: torch.Tensor, positioned: torch.Tensor) -> torch.Tensor:
        """Return [S, N, heads * V] with keys and values expanded for all heads."""
        sizes, terms = self.latent, self.core_attention.terms
        expanded = self.linear_kv_up_proj(low[:, :, 0])[0].unflatten(-1, (-1, sizes.nope + sizes.value))
        keys, values = expanded.split([sizes.nope, sizes.value], dim=-1)
        keys = torch.cat([keys, positioned.expand(-1, -1, keys.size(2), -1)], dim=-1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (queries, keys, values))
        out = causal_attention(q, k, v, terms.scale, terms.window, terms.softcap)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _decode(
        self, plain: torch.Tensor, rotated: torch.Tensor, kept: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Return [1, B, heads * V] from the stored vectors `kept`, [B, W, 1, rank + R]."""
        sizes, terms = self.latent, self.core_attention.terms
        matrices = adapted_weight(self.linear_kv_up_proj).unflatten(0, (-1, sizes.nope + sizes.value))
        to_keys, to_values = matrices.split([sizes.nope, sizes.value], dim=1)  # [heads, nope or V, rank]
        lowered = torch.einsum("bhn,hnr->bhr", plain[0], to_keys)
        q = torch.cat([lowered, rotated[0]], dim=-1)[:, None]  # [B, 1, heads, rank + R]
        k = kept.transpose(1, 2)
        scale = terms.scale or 1 / math.sqrt(sizes.head_dim)
        out = F.scaled_dot_product_attention(q, k, k[..., : sizes.kv_rank], attn_mask=bias, scale=scale)
        return torch.einsum("bhr,hvr->bhv", out[:, 0], to_values).flatten(1)[None]


def _with_sinks(bias: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the bias of scores, [B, kv heads, group, W + 1], with the sinks as last column.

    Args:
        bias: bias of the tokens, [B, 1, 1, W].
        sinks: [1, kv heads, group, 1].
    """
    columns = bias.expand(-1, sinks.size(1), sinks.size(2), -1), sinks.expand(len(bias), -1, -1, -1)
    return torch.cat(columns, dim=-1)
