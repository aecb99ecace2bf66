"""Sets which activations the backward pass computes again, by megatron's own means and names."""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import TransformerConfig

from protocol.errors import SettingsError
from trainer.config import TrainerConfig
from trainer.megatron.layout import Layout


def set_recompute(config: TransformerConfig, trainer: TrainerConfig, layout: Layout) -> None:
    """Set megatron's fields before a model is built with `config`; return at once without recomputation.

    They are set after megatron has made the configuration: it warns of `core_attn` for any attention.

    Raises:
        SettingsError: the layers of a chunk do not divide into equal pieces.
    """
    if not trainer.recompute_granularity:
        return
    config.recompute_granularity = trainer.recompute_granularity
    if trainer.recompute_granularity == "selective":
        # megatron 0.16 takes every default but None for fp8, which needs TransformerEngine
        CheckpointWithoutOutput.__init__.__defaults__ = (None,)
        config.recompute_modules = list(trainer.recompute_modules)
        return
    pieces = trainer.recompute_num_layers
    for layers in sorted({len(chunk) for stage in layout.stages for chunk in stage}):
        if trainer.recompute_method == "uniform" and layers % pieces:
            raise SettingsError(
                f"setting trainer.recompute_num_layers: {pieces} does not divide the {layers} layers of a "
                "pipeline stage or chunk; choose a divisor, or trainer.recompute_method 'block'"
            )
    config.recompute_method, config.recompute_num_layers = trainer.recompute_method, pieces


def keep_input_gradient(model: GPTModel, trainer: TrainerConfig) -> None:
    """Have the first layer's input require a gradient, also where the embedding is frozen.

    A recomputed part gets a gradient only if its input requires one; without it the adapters of the first
    layer would silently not be trained.
    """
    if trainer.recompute_granularity and model.pre_process:
        model.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def forget_passes(model: GPTModel) -> None:
    """Drop the layers' state of a pass that did not end."""
    for layer in model.decoder.layers:
        layer.input_layernorm_checkpoint = layer.pre_mlp_norm_checkpoint = None
