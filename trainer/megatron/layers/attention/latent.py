"""Computes multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) over packed sequences.

megatron's MLA does not support packed sequences without TransformerEngine. Keys and values are expanded for
all heads, as in a prefill: in training, there is no cache to keep small.

Shapes: T tokens, t of them on this rank (t = T without sequence parallelism); H hidden size; D size of a
head's query and key, whose last R dimensions encode the position; V size of a head's value. Heads are the
heads of this tensor rank.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.attention.terms import AttentionTerms
from trainer.megatron.families.latent import Latent
from trainer.megatron.layers.attention.core import PackedAttention
from trainer.megatron.layers.attention.rotary import RotarySequences
from trainer.megatron.layers.dense import RMSNorm, by_heads, joining_heads
from trainer.megatron.layers.tensor_parallel import whole_parameter

EPS = 1e-6
"""Epsilon of the low-rank norms; fixed in transformers, independent of `rms_norm_eps`."""


class LatentAttention(MegatronModule):
    """Self-attention of a layer. Tensor ranks split the heads, and each computes the low-rank vectors itself.

    Without sequence parallelism, every rank has the full gradient of replicated tensors, because later layers
    and regions sum over ranks. With sequence parallelism, each rank has the gradient of its own tokens, and
    parameter attributes make megatron sum the gradients.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        latent: Latent,
        terms: AttentionTerms,
        rotary_factor: float,
        **unused: Any,
    ) -> None:
        """Create the layer's parameters, uninitialized; other arguments as in `LatentCore`."""
        super().__init__(config=config)
        self.latent = latent
        hidden, heads = config.hidden_size, config.num_attention_heads
        if latent.query_rank:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, latent.query_rank)
            self.q_layernorm = RMSNorm(config, latent.query_rank, EPS)
            self.linear_q_up_proj = by_heads(config, latent.query_rank, heads * latent.head_dim)
        else:
            self.linear_q_proj = by_heads(config, hidden, heads * latent.head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent.kv_rank + latent.rope)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, EPS)
        self.linear_kv_up_proj = by_heads(config, latent.kv_rank, heads * (latent.nope + latent.value))
        self.core_attention = LatentCore(config, terms, latent, rotary_factor)
        self.linear_proj = joining_heads(config, heads * latent.value)
        self.recomputes_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: RotarySequences,
        **unused: Any,
    ) -> Any:
        """Map [t, 1, H] to the same shape; return the output and None, megatron's convention without bias."""
        tensors = self._queries(hidden_states), *self._keys_and_values(hidden_states)
        attention: Any = self.core_attention
        core = partial(attention, attention_mask=None, packed_seq_params=packed_seq_params)
        out = checkpoint(core, False, *tensors) if self.recomputes_core and self.training else core(*tensors)
        return self.linear_proj(out.flatten(1)[:, None])

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, heads, D]."""
        if self.latent.query_rank:
            low = self.q_layernorm(self.linear_q_down_proj(hidden))
            queries = self.linear_q_up_proj(low)[0]
        else:
            queries = self.linear_q_proj(hidden)[0]
        return queries.view(len(queries), -1, self.latent.head_dim)

    def _keys_and_values(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unrotated keys [T, heads, D] and values [T, heads, V]."""
        sizes = self.latent
        low, positioned = self.linear_kv_down_proj(hidden).split([sizes.kv_rank, sizes.rope], dim=-1)
        expanded = self.linear_kv_up_proj(self.kv_layernorm(low))[0]
        keys, values = expanded.view(len(expanded), -1, sizes.nope + sizes.value).split(
            [sizes.nope, sizes.value], dim=-1
        )
        # Each rank uses `positioned` only for its own heads, so its gradient is a sum over the ranks.
        if self.config.sequence_parallel:
            positioned = gather_from_sequence_parallel_region(positioned)
        else:
            positioned = copy_to_tensor_model_parallel_region(positioned)
        return torch.cat([keys, positioned.expand(-1, keys.size(1), -1)], dim=-1), values


class LatentCore(PackedAttention):
    """Core attention with rotation of only the last dimensions of queries and keys."""

    def __init__(
        self, config: TransformerConfig, terms: AttentionTerms, latent: Latent, rotary_factor: float
    ) -> None:
        """Bind to a layer.

        Args:
            config: megatron's configuration of the model.
            terms: attention terms of the layer.
            latent: sizes of the attention.
            rotary_factor: yarn's factor of the rotated dimensions; not of all, so it cannot be part of the
                scale.
        """
        super().__init__(config, terms)
        self.latent, self.rotary_factor = latent, rotary_factor

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, sequences: RotarySequences
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [self.latent.nope, self.latent.rope]
        (kept_q, q), (kept_k, k) = query.split(sizes, dim=-1), key.split(sizes, dim=-1)
        q, k = sequences.angles[self.terms.rope].rotate(q, k)
        if self.rotary_factor != 1.0:
            q, k = q * self.rotary_factor, k * self.rotary_factor
        return torch.cat([kept_q, q], dim=-1), torch.cat([kept_k, k], dim=-1)


class ReplicatedLinear(torch.nn.Module):
    """Linear layer without bias, replicated on every tensor rank."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = whole_parameter(config, outputs, inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)
