"""Finds the layers whose weights vLLM processes after loading, and processes them on shadows.

vLLM records each layer's parameters before processing. Latent attention is processed after the layers that it
computes with.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from rollout.engines.multi_process.processed_layers import (
    PROCESS,
    LayerProcessing,
    layouts,
    like,
    processings,
    with_staged,
)
from rollout.staging.shadows import Staged

DONE = "_already_called_process_weights_after_loading"
"""Flag that vLLM sets on a processed layer."""


class VllmRules:
    """vLLM's rules; see `LayerRules`."""

    searched = ("vllm.model_executor.", "vllm.v1.attention.")

    def __init__(self, vllm_config: Any) -> None:
        from vllm.model_executor.model_loader.reload import meta

        self._config = vllm_config
        self.kept: Collection[str] = frozenset(meta.SKIP_TENSORS)

    def unprocessed(self, layer: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return a layer's original parameters, which vLLM recorded, with their loaders."""
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        found = {}
        for key, recorded in get_layerwise_info(layer).restore_metadata[0].items():
            tensor = restore_layer_refs(like(recorded, recorded), layer)
            if hasattr(tensor, "weight_loader"):
                tensor.weight_loader = _get_original_loader(tensor)
            found[key] = tensor
        return found

    def is_latent(self, layer: nn.Module) -> bool:
        """Return whether a layer is latent attention, which loads no weights of its own."""
        from vllm.model_executor.layers.attention import MLAAttention

        return isinstance(layer, MLAAttention)

    def process(self, shadow: Any, staged: Staged) -> None:
        """Process a shadow's weights in place, with vLLM's processing of the layer."""
        from vllm.config import set_current_vllm_config

        vars(shadow).pop(DONE, None)
        # vLLM's current config is global to the process, not to the thread. vLLM sets it only during its
        # start and its own weight updates, always to this config, so no thread sees another one.
        with set_current_vllm_config(self._config):
            if self.is_latent(shadow):
                shadow._modules = {key: with_staged(child, staged) for key, child in shadow._modules.items()}
                getattr(shadow, PROCESS)(self._config.model_config.dtype)
            else:
                getattr(shadow.quant_method, PROCESS)(shadow)


def vllm_processings(model: nn.Module, vllm_config: Any, differing: Collection[str]) -> list[LayerProcessing]:
    """Return vLLM's processed layers; arguments: see `processings`."""
    return processings(model, VllmRules(vllm_config), _is_processed, differing)


def _is_processed(layer: nn.Module, before: Mapping[str, torch.Tensor], changed: bool) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    is_plain = (
        type(method).__name__.startswith("Unquantized")
        and layouts(before).items() <= layouts(layer._parameters).items()
    )
    return changed or not is_plain


def load_biased_experts() -> None:
    """Allocate experts with biases, which only gpt-oss has, before they are loaded.

    For online quantization, vLLM creates parameters on `meta`, and wraps each loader to quantize a layer
    after its last parameter is loaded. gpt-oss's loader bypasses the wrapper (vLLM 0.26 and 0.32,
    `_load_weights_other`), so vLLM would quantize uninitialized memory.
    """
    try:
        from vllm.model_executor.layers.quantization.online import moe_base
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer
    except ImportError:  # older vLLM
        return
    begin = moe_base.initialize_online_processing

    def initialize_online_processing(layer: Any) -> None:
        begin(layer)
        if "w13_bias" in layer._parameters:
            materialize_layer(layer, get_layerwise_info(layer))

    moe_base.initialize_online_processing = initialize_online_processing
