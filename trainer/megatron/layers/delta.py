"""Computes gated delta nets (Yang et al. 2024, arXiv 2412.06464) over packed samples with separate states.

megatron's own layer does not support packed samples, and requires flash-linear-attention even where its
kernels do not run. This layer uses the same convolution and delta rule as transformers: the kernels of
causal-conv1d and flash-linear-attention if installed, otherwise plain torch.

Shapes: T tokens, t of them on this rank (t = T without sequence parallelism); H hidden size; n samples of a
segment, L tokens of the longest. Heads are the heads of this tensor rank.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from trainer.layers.attention.segmented import AttentionSegment
from trainer.megatron.families.delta import DeltaNet
from trainer.megatron.layers.attention.rotary import RotarySequences
from trainer.megatron.layers.dense import by_heads, joining_heads, rms_norm
from trainer.megatron.layers.tensor_parallel import empty_parameter


class DeltaNetLayer(MegatronModule):
    """Gated delta net of a layer. Tensor ranks split the key heads, each with its value heads.

    The samples of a segment are right-padded rows. Padding affects no state that is used.
    """

    def __init__(self, config: TransformerConfig, *, delta: DeltaNet, **unused: Any) -> None:
        """Create the layer's parameters, uninitialized."""
        from transformers.models.qwen3_next import modeling_qwen3_next as published  # slow import

        super().__init__(config=config)
        # before transformers 5.19, these names are the kernels themselves, None if not installed
        self._convolve = published.causal_conv1d_fn or convolved
        kernel = getattr(published, "chunk_gated_delta_rule", None)
        self._delta_rule = kernel or published.torch_chunk_gated_delta_rule
        self.delta = delta
        ranks = config.tensor_model_parallel_size
        values = delta.value_heads // ranks
        self.in_proj = by_heads(config, config.hidden_size, delta.key_heads * sum(delta.sizes))
        channels = delta.key_heads * sum(delta.sizes[:3]) // ranks
        self.conv = empty_parameter(config, channels, 1, delta.kernel)
        self.dt_bias, self.a_log = empty_parameter(config, values), empty_parameter(config, values)
        self.norm = torch.nn.Module()
        self.norm.weight = empty_parameter(config, delta.value)
        self.out_proj = joining_heads(config, delta.value_heads * delta.value)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: RotarySequences,
        **unused: Any,
    ) -> Any:
        """Map [t, 1, H] to the same shape; return the output and None, megatron's convention without bias."""
        delta = self.delta
        sizes = [sum(delta.sizes[:3]), *delta.sizes[3:]]
        rows = self.in_proj(hidden_states)[0][:, 0].unflatten(-1, (-1, sum(sizes)))
        mixed, gates, strengths, decays = rows.split(sizes, dim=-1)
        strengths = strengths.flatten(1).sigmoid()
        decays = -self.a_log.float().exp() * F.softplus(decays.flatten(1).float() + self.dt_bias)
        out = torch.cat(
            [
                # Storing the intermediates of its chunks would need more memory than the rest of the layer.
                checkpoint(self._segment, mixed, strengths, decays, segment, use_reentrant=False)
                for segment in packed_seq_params.segments
            ]
        )
        # Each rank normalizes its own heads, so the weight's gradient is a sum over the ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm.weight)
        normed = rms_norm(out.float(), weight.float(), self.config.layernorm_epsilon)
        gated = normed * F.silu(gates.unflatten(-1, (-1, delta.value)).flatten(1, 2).float())
        return self.out_proj(gated.to(out.dtype).flatten(1)[:, None])

    def _segment(
        self,
        mixed: torch.Tensor,
        strengths: torch.Tensor,
        decays: torch.Tensor,
        segment: AttentionSegment,
    ) -> torch.Tensor:
        """Return the outputs of a segment's tokens, [tokens, value heads, V].

        Args:
            mixed: [T, key heads, R], query, key and values of each head before the convolution.
            strengths: [T, value heads].
            decays: [T, value heads], logarithms.
            segment: segment of the T tokens.
        """
        delta = self.delta
        heads = mixed.size(1)
        channels = segment.pad_repeat(mixed).transpose(2, 3).flatten(1, 2)  # [n, key heads * R, L]
        convolved = self._convolve(channels.contiguous(), self.conv[:, 0], None, activation="silu")
        rows = convolved.unflatten(1, (heads, -1)).permute(0, 3, 1, 2)  # [n, L, key heads, R]
        query, key, values = rows.split(delta.sizes[:3], dim=-1)
        strengths, decays = (segment.pad_repeat(x[..., None])[..., 0].mT for x in (strengths, decays))
        out, _ = self._delta_rule(
            *(x.repeat_interleave(delta.values_of_key, dim=2) for x in (query, key)),
            values.unflatten(-1, (-1, delta.value)).flatten(2, 3),
            g=decays.contiguous(),
            beta=strengths.contiguous(),
            use_qk_l2norm_in_kernel=True,
        )
        return segment.unpad(out.transpose(1, 2))


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: None, activation: Literal["silu"]) -> torch.Tensor:
    """Return the causal convolution of each channel with its own kernel. Signature as in causal-conv1d.

    Args:
        x: [n, C, L].
        weight: [C, length of the kernel].
        bias: must be None.
        activation: activation of the result.
    """
    padded = F.pad(x, (weight.size(1) - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=x.size(1)))
