"""Names the layers whose weights SGLang processes after loading, and processes them on shadows.

SGLang forgets how a layer was before that: `remember` notes it when the model is made. Latent attention takes
the weights of its `kv_b_proj` apart as they are loaded, before these are quantised. So its tensors are made
where `kv_b_proj` is processed.
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
"""Part of latent attention that is taken apart."""
DERIVED = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")
"""Attributes that latent attention gets by it."""
EXPANSION = "_tether_expansion"
"""Attribute of that part: the tensors that its attention gets, by name."""
FINISH = "post_load_weights"
"""Method of a model that does it, at the end of loading."""
UNLOADED = "_tether_unloaded"
"""Attribute of a layer: returns the parameters that no loader fills, as they were when it was made."""

_made: WeakKeyDictionary[nn.Module, Mapping[str, torch.Tensor]] = WeakKeyDictionary()
"""Layer -> its parameters when it was made, on `meta`."""


def remember(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Note the parameters of a model whose layers SGLang processes, before weights are loaded."""
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
            if unloaded:  # in a function: the layer holds no further tensor
                vars(layer)[UNLOADED] = partial(_parameters, unloaded)


class SglangRules:
    """SGLang's rules; see `LayerRules`."""

    searched = ("sglang.srt.layers.",)
    kept: Collection[str] = ()

    def __init__(self, model: Any) -> None:
        """Note which part of each latent attention its tensors come from.

        Raises:
            EngineSettingsError: naming an attention that has such tensors and a part that was not remembered.
        """
        self._model = model
        self._attention: dict[int, nn.Module] = {}
        """id of an `EXPANSION`, which a shadow shares with its layer, -> the attention."""
        for name, attention in model.named_modules():
            if tensors := _derived(attention):
                expanded = attention._modules[EXPANDED]
                if expanded not in _made:
                    raise EngineSettingsError(f"layer {name}: SGLang made no {EXPANDED} that it processes")
                vars(expanded)[EXPANSION] = tensors
                self._attention[id(tensors)] = attention

    def unprocessed(self, layer: nn.Module) -> Mapping[str, torch.Tensor]:
        """See `LayerRules`."""
        return _made.get(layer, {})

    def is_latent(self, layer: nn.Module) -> bool:
        """See `LayerRules`: attention that has scales alone."""
        return UNLOADED in vars(layer) and not _made[layer]

    def process(self, shadow: Any, staged: Staged) -> None:
        """See `LayerRules`."""
        if EXPANSION in vars(shadow):
            attention: Any = copied(self._attention[id(vars(shadow)[EXPANSION])])
            vars(shadow)[EXPANSION] = self._expand(attention, shadow)
        if UNLOADED in vars(shadow):  # scales in 8 bits, which SGLang writes in place
            shadow._parameters |= vars(shadow)[UNLOADED](next(self._model.parameters()).device)
        getattr(shadow.quant_method, PROCESS)(shadow)

    def _expand(self, attention: Any, expanded: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that SGLang makes of weights in `expanded`, for a copy of their attention."""
        attention._modules[EXPANDED] = expanded
        for name in _derived(attention):  # SGLang would write into these tensors, which are the live ones
            setattr(attention, name, None)
        layers = {0: SimpleNamespace(self_attn=attention)}
        model: Any = copied(self._model)
        model._modules["model"] = None
        vars(model)["model"] = SimpleNamespace(start_layer=0, end_layer=1, layers=layers)
        getattr(type(model), FINISH)(model)
        return _derived(attention)


def sglang_processings(model: nn.Module, differing: Collection[str]) -> list[LayerProcessing]:
    """Return SGLang's processed layers; arguments as in `processings`."""
    return processings(model, SglangRules(model), _is_processed, differing)


def loader_of(model: nn.Module) -> Any:
    """Return the model with a loader that may be traced: it derives no tensors at its end."""
    loader = copied(model)
    vars(loader)[FINISH] = lambda *args, **kwargs: None
    return loader


def _derived(attention: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that latent attention has of its `EXPANDED` part; empty for other layers."""
    if EXPANDED not in attention._modules:
        return {}
    tensors = {name: getattr(attention, name, None) for name in DERIVED}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def _parameters(values: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, nn.Parameter]:
    """Return new parameters with `values`."""
    return {key: nn.Parameter(value.to(device, copy=True), False) for key, value in values.items()}


def _is_processed(layer: nn.Module, before: Mapping[str, torch.Tensor], changed: bool) -> bool:
    is_plain = type(layer.quant_method).__name__.startswith("Unquantized") and EXPANSION not in vars(layer)
    return changed or not is_plain or not layouts(before).items() <= layouts(layer._parameters).items()
