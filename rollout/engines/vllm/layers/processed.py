"""Processes a version's weights as vLLM does after loading them, on shadows of its layers.

vLLM remembers how each layer was before its weights were processed; a shadow is the live layer with such
parameters in place of the live ones. Its quantisation method and kernels are copies, which keep what
processing writes into them. Latent attention is processed after the layers that it computes with.
"""

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rollout.staging.shadows import Staged

PROCESS = "process_weights_after_loading"
DONE = "_already_called_process_weights_after_loading"
"""Flag of a layer that vLLM has processed."""
SEARCHED = ("vllm.model_executor.", "vllm.v1.attention.")
"""Beginnings of the modules whose objects may hold a layer's tensors."""
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class LayerProcessing:
    """A layer's processing; see `Processing`."""

    def __init__(self, name: str, layer: nn.Module, vllm_config: Any) -> None:
        """Find the layer's parameters as they were before they were processed."""
        self.name = name
        self._layer = layer
        self._config = vllm_config
        self._unprocessed = _unprocessed(layer)
        self.inputs: Mapping[str, torch.Tensor] = {
            f"{name}.{key}": tensor for key, tensor in self._unprocessed.items()
        }

    def loading(self) -> Any:
        """Return a shadow with parameters on `meta`, for a loader that is traced."""
        return self._shadow(self._unprocessed)

    def live(self) -> dict[str, torch.Tensor]:
        """See `Processing`."""
        return dict(_tensors(self.name, self._layer))

    def process(self, inputs: Mapping[str, torch.Tensor], staged: Staged) -> dict[str, torch.Tensor]:
        """See `Processing`."""
        from vllm.config import set_current_vllm_config

        shadow = self._shadow(
            {key: _like(tensor, inputs[f"{self.name}.{key}"]) for key, tensor in self._unprocessed.items()}
        )
        # vLLM's current settings are the process's, not the thread's. It sets them itself while it starts and
        # in its own weight updates, and always to these, so that no thread sees others.
        device = next(iter([*inputs.values(), *self.live().values()])).device
        with torch.no_grad(), device, set_current_vllm_config(self._config):
            if _is_latent(shadow):
                shadow._modules = {key: _with_staged(child, staged) for key, child in shadow._modules.items()}
                getattr(shadow, PROCESS)(self._config.model_config.dtype)
            else:
                getattr(shadow.quant_method, PROCESS)(shadow)
        live = self.live()
        return {
            path: tensor
            for path, tensor in _tensors(self.name, shadow)
            if path not in live or live[path].data_ptr() != tensor.data_ptr()
        }

    def _shadow(self, parameters: Mapping[str, torch.Tensor]) -> Any:
        shadow: Any = _copied(self._layer)
        kept = shadow._parameters.keys() & _unloaded()
        shadow._parameters = {key: shadow._parameters[key] for key in kept} | dict(parameters)
        shadow._buffers = {
            key: None if tensor is None else tensor.clone() for key, tensor in shadow._buffers.items()
        }
        vars(shadow).pop(DONE, None)
        _copy_helpers(shadow)
        return shadow


def processings(model: nn.Module, vllm_config: Any, repacked: Collection[str]) -> list[LayerProcessing]:
    """Return the processing of each layer whose live parameters are not those that the loader fills.

    Args:
        model: vLLM's.
        vllm_config: its settings.
        repacked: names of live parameters that hold something else than the loader wrote.
    """
    found: dict[int, LayerProcessing] = {}
    for name, layer in model.named_modules():
        names = {f"{name}.{key}" for key in layer._parameters}
        if _is_latent(layer) or _is_processed(layer, not names.isdisjoint(repacked)):
            found[id(layer)] = LayerProcessing(name, layer, vllm_config)
    return list(found.values())


def loading(model: nn.Module, layers: Collection[LayerProcessing]) -> Any:
    """Return a model that shares all but `layers`, which are as their loader fills them."""
    shadows = {id(one._layer): one.loading() for one in layers}
    return _replaced(model, shadows)


def _replaced(module: nn.Module, shadows: dict[int, nn.Module]) -> nn.Module:
    """Return `module` itself if none of its parts is replaced; `shadows` gets what it returns."""
    if id(module) not in shadows:
        parts = {key: child and _replaced(child, shadows) for key, child in module._modules.items()}
        shadows[id(module)] = module
        if any(part is not module._modules[key] for key, part in parts.items()):
            shadows[id(module)] = _copied(module)
            shadows[id(module)]._modules = parts
    return shadows[id(module)]


def _is_latent(layer: nn.Module) -> bool:
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(layer, MLAAttention)


def _is_processed(layer: nn.Module, is_repacked: bool) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    before = {key: (tensor.shape, tensor.dtype) for key, tensor in _unprocessed(layer).items()}
    now = {
        key: (tensor.shape, tensor.dtype) for key, tensor in layer._parameters.items() if tensor is not None
    }
    is_plain = type(method).__name__.startswith("Unquantized") and before.items() <= now.items()
    return bool(before) and (is_repacked or not is_plain)


def _unprocessed(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that a layer had when vLLM made it, on `meta`, with their loaders."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    found = {}
    for key, recorded in get_layerwise_info(layer).restore_metadata[0].items():
        tensor = restore_layer_refs(_like(recorded, recorded), layer)
        if hasattr(tensor, "weight_loader"):
            tensor.weight_loader = _get_original_loader(tensor)
        found[key] = tensor
    return found


def _unloaded() -> frozenset[str]:
    """Return the names of parameters that vLLM never takes for a layer's own."""
    from vllm.model_executor.model_loader.reload import meta

    return frozenset(meta.SKIP_TENSORS)


def _like(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return `data` as a parameter of vLLM's class and with its attributes."""
    tensor = data.detach()
    tensor.__class__ = parameter.__class__
    tensor.__dict__ = dict(parameter.__dict__)
    return tensor


def _copied(module: nn.Module) -> nn.Module:
    """Return a module with the same attributes, whose parameters, buffers and parts can be replaced."""
    new: nn.Module = object.__new__(type(module))
    new.__dict__ = dict(vars(module))
    for members in ("_parameters", "_buffers", "_modules"):
        new.__dict__[members] = dict(vars(module)[members])
    return new


def _with_staged(module: nn.Module | None, staged: Staged) -> nn.Module | None:
    if module is None:
        return None
    new: Any = _copied(module)
    new._parameters = {
        key: None if tensor is None else _like(tensor, staged(tensor))
        for key, tensor in new._parameters.items()
    }
    return new


def _copy_helpers(owner: Any) -> None:
    """Copy the objects that process weights for `owner`, and those that do so for them."""
    for key, value in list(vars(owner).items()):
        if not isinstance(value, nn.Module | torch.Tensor | type) and callable(getattr(value, PROCESS, None)):
            vars(owner)[key] = helper = copy.copy(value)
            _copy_helpers(helper)


def _tensors(name: str, layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer and of the objects that compute for it, by where they are."""
    own = {key: value for key, value in vars(layer).items() if key not in OF_MODULES}
    return _search(name, {**own, **layer._buffers, **layer._parameters}, set())


def _search(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield path, value
        return
    if isinstance(value, nn.Module | type) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        members = value
    elif isinstance(value, list | tuple):
        members = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith(SEARCHED):
        members = getattr(value, "__dict__", {})
    else:
        return
    for key, member in members.items():
        yield from _search(f"{path}.{key}", member, seen)
