"""Finds the layers whose weights SGLang processes after loading, and processes them on shadows.

SGLang does not keep a layer's original parameters, so `remember` records them when the model is created.
Latent attention splits the loaded weights of its `kv_b_proj` before they are quantized. Its tensors are
therefore created when `kv_b_proj` is processed.
"""

from collections.abc import Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from protocol.errors import EngineSettingsError
from rollout.engines.multi_process.processed_layers import (
    PROCESS,
    LayerProcessing,
    copied,
    layouts,
    like,
    processings,
)
from rollout.staging.shadows import Staged

EXPANDED = "kv_b_proj"
"""Submodule of latent attention whose weights are split."""
DERIVED = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")
"""Attributes of latent attention derived from the split weights."""
EXPANSION = "_tether_expansion"
"""Attribute of `kv_b_proj`: name -> derived tensor of its attention."""
FINISH = "post_load_weights"
"""Model method that derives the tensors at the end of loading."""
UNLOADED = "_tether_unloaded"
"""Layer attribute: function that returns the original values of parameters that no loader fills."""

_made: WeakKeyDictionary[nn.Module, Mapping[str, torch.Tensor]] = WeakKeyDictionary()
"""Layer -> its original parameters, on `meta`."""


def remember(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Record the parameters of layers that SGLang processes, before weights are loaded."""
    for layer in model.modules():
        if callable(getattr(getattr(layer, "quant_method", None), PROCESS, None)):
            made = {key: tensor for key, tensor in layer._parameters.items() if tensor is not None}
            _made[layer] = {
                key: like(tensor, torch.empty_like(tensor, device="meta"))
                for key, tensor in made.items()
                if hasattr(tensor, "weight_loader")
            }
            unloaded = {
                key: made[key].detach().to("cpu", copy=True) for key in made.keys() - _made[layer].keys()
            }
            if unloaded:  # wrapped in a function, so that the layer holds no further tensor
                vars(layer)[UNLOADED] = partial(_parameters, unloaded)


class SglangRules:
    """SGLang's rules; see `LayerRules`."""

    searched = ("sglang.srt.layers.",)
    kept: Collection[str] = ()

    def __init__(self, model: Any) -> None:
        """Record the submodule that each latent attention derives its tensors from.

        Raises:
            EngineSettingsError: an attention with derived tensors has a submodule that was not recorded; the
                message names the attention.
        """
        self._model = model
        self._attention: dict[int, nn.Module] = {}
        """id of an `EXPANSION`, which a shadow shares with its layer -> attention."""
        for name, attention in model.named_modules():
            if tensors := _derived(attention):
                expanded = attention._modules[EXPANDED]
                if expanded not in _made:
                    raise EngineSettingsError(f"layer {name}: SGLang made no {EXPANDED} that it processes")
                vars(expanded)[EXPANSION] = tensors
                self._attention[id(tensors)] = attention

    def unprocessed(self, layer: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return a layer's recorded original parameters; empty if SGLang does not process the layer."""
        return _made.get(layer, {})

    def is_latent(self, layer: nn.Module) -> bool:
        """Return whether an attention layer has only scales; see `LayerRules`."""
        return UNLOADED in vars(layer) and not _made[layer]

    def process(self, shadow: Any, staged: Staged) -> None:
        """Process a shadow's weights in place, and derive the tensors of its latent attention, if any."""
        if EXPANSION in vars(shadow):
            attention: Any = copied(self._attention[id(vars(shadow)[EXPANSION])])
            vars(shadow)[EXPANSION] = self._expand(attention, shadow)
        if UNLOADED in vars(shadow):  # 8-bit scales, which SGLang updates in place
            shadow._parameters |= vars(shadow)[UNLOADED](next(self._model.parameters()).device)
        getattr(shadow.quant_method, PROCESS)(shadow)

    def _expand(self, attention: Any, expanded: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that SGLang derives from `expanded`, using a copy of its attention."""
        attention._modules[EXPANDED] = expanded
        for name in _derived(attention):  # SGLang would otherwise write to these live tensors
            setattr(attention, name, None)
        layers = {0: SimpleNamespace(self_attn=attention)}
        model: Any = copied(self._model)
        model._modules["model"] = None
        vars(model)["model"] = SimpleNamespace(start_layer=0, end_layer=1, layers=layers)
        getattr(type(model), FINISH)(model)
        return _derived(attention)


def sglang_processings(model: nn.Module, differing: Collection[str]) -> list[LayerProcessing]:
    """Return SGLang's processed layers; arguments: see `processings`."""
    return processings(model, SglangRules(model), _is_processed, differing)


def loader_of(model: nn.Module) -> Any:
    """Return the model with a traceable loader that derives no tensors at its end."""
    loader = copied(model)
    vars(loader)[FINISH] = lambda *args, **kwargs: None
    return loader


def _derived(attention: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that latent attention derived from `EXPANDED`; empty for other layers."""
    if EXPANDED not in attention._modules:
        return {}
    tensors = {name: getattr(attention, name, None) for name in DERIVED}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def _parameters(values: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, nn.Parameter]:
    """Return `values` as new parameters on a device."""
    return {key: nn.Parameter(value.to(device, copy=True), False) for key, value in values.items()}


def _is_processed(layer: nn.Module, before: Mapping[str, torch.Tensor], changed: bool) -> bool:
    is_plain = type(layer.quant_method).__name__.startswith("Unquantized") and EXPANSION not in vars(layer)
    return changed or not is_plain or not layouts(before).items() <= layouts(layer._parameters).items()
