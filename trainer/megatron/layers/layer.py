"""Defines the layers of a model: attention and MLP around the residual stream, in the supported orders.

megatron's own layer checks in every pass for features that no model here has: cross-attention, dropout,
activation offloading, fused communication. Its parameters and its recomputation choices are kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from trainer.megatron.layers.dense import RMSNorm


class Layer(TransformerLayer):
    """Sequential pre-norm layer: attention, then MLP, each on the normed residual stream."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        padding_mask: Any = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute the layer, with the arguments and recomputation of megatron's layer."""
        norm, discard = _with_recompute(self.input_layernorm, self.recompute_input_layernorm)
        attended = self.self_attention(
            norm(hidden_states),
            attention_mask=attention_mask,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
        )
        discard(attended[0])
        hidden_states = self.self_attn_bda(self.training, False)(attended, hidden_states, 0.0)
        norm, discard = _with_recompute(self.pre_mlp_layernorm, self.recompute_pre_mlp_layernorm)
        normed, mlp = norm(hidden_states), partial(self.mlp, padding_mask=padding_mask)
        widened = checkpoint(mlp, False, normed) if self.recompute_mlp else mlp(normed)
        discard(widened[0])
        return self.mlp_bda(self.training, False)(widened, hidden_states, 0.0), None


class PostNormLayer(Layer):
    """Layer that norms the outputs of attention and MLP before adding them to the residual stream."""

    def __init__(self, config: TransformerConfig, norm: type[RMSNorm], **others: Any) -> None:
        super().__init__(config=config, **others)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm = norm(config, size, eps)
        self.post_mlp_layernorm = norm(config, size, eps)
        self.self_attn_bda = partial(residual, norm=self.post_attention_layernorm)
        self.mlp_bda = partial(residual, norm=self.post_mlp_layernorm)


class ParallelLayer(TransformerLayer):
    """Parallel layer: attention and MLP have the same input, and both outputs are added to the residual."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute the layer, with the arguments and recomputation of megatron's layer."""
        norm, discard = _with_recompute(self.input_layernorm, self.recompute_input_layernorm)
        normed = norm(hidden_states)
        attended = self.self_attention(
            normed,
            attention_mask=attention_mask,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
        )
        widened = checkpoint(self.mlp, False, normed) if self.recompute_mlp else self.mlp(normed)
        added = _with_bias(attended) + _with_bias(widened)
        discard(added)
        return hidden_states + added, None


def residual(training: bool, fused: bool, norm: RMSNorm | None = None) -> Any:
    """Return megatron's bias-dropout-add without dropout, which no model here has.

    With a `norm`, the addend of the residual stream is normed first.
    """

    def add(
        output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, probability: float
    ) -> torch.Tensor:
        added = _with_bias(output_and_bias)
        return residual + (added if norm is None else norm(added))

    return add


def _with_recompute(
    norm: Any, recomputes: bool
) -> tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], object]]:
    """Return a norm, and a function to call with a result computed from its output.

    If the norm is recomputed, the function discards the output, and the backward pass of the result
    recomputes it.
    """
    if not recomputes:
        return norm, _keep_output
    kept = CheckpointWithoutOutput()
    return partial(kept.checkpoint, norm), kept.discard_output_and_register_recompute


def _keep_output(result: torch.Tensor) -> None:
    """Keep the output of a norm."""


def _with_bias(output_and_bias: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    output, bias = output_and_bias
    return output if bias is None else output + bias
