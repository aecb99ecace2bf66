"""Applies an engine's post-load weight processing to a version, on shadows of the engine's layers.

A shadow is a copy of the live layer with parameters as they were before processing. Its quantization method
and kernels are copied, because processing writes to them. The engine's own folder provides the processing and
the attributes of its layers (`LayerRules`).
"""

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from rollout.staging.loaded_weights import check_loaded, repacked
from rollout.staging.loader_trace import LoaderTrace, record
from rollout.staging.places import StagingRoom
from rollout.staging.shadows import ShadowedPlan, Staged, shadowed_plan
from rollout.staging.staging_plan import AnyPlan, make_plan

PROCESS = "process_weights_after_loading"
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module."""


class LayerRules(Protocol):
    """Engine-specific rules for layers."""

    @property
    def searched(self) -> tuple[str, ...]:
        """Module prefixes of objects that may hold a layer's tensors."""

    @property
    def kept(self) -> Collection[str]:
        """Names of parameters that no loader fills; they are kept unchanged."""

    def unprocessed(self, layer: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the parameters that a layer was created with, on `meta`, with their loaders."""

    def is_latent(self, layer: nn.Module) -> bool:
        """Return whether a layer loads no weights and computes with other layers' weights."""

    def process(self, shadow: Any, staged: Staged) -> None:
        """Process a shadow's weights in place; `staged` returns staged copies of other layers' weights."""


class LayerProcessing:
    """Processing of one layer; see `Processing`."""

    def __init__(self, name: str, layer: nn.Module, rules: LayerRules) -> None:
        """Find the layer's parameters as they were before processing."""
        self.name = name
        self.layer = layer
        self._rules = rules
        self._unprocessed = rules.unprocessed(layer)
        self.inputs: Mapping[str, torch.Tensor] = {
            f"{name}.{key}": tensor for key, tensor in self._unprocessed.items()
        }

    def loading(self) -> Any:
        """Return a shadow with parameters on `meta`, for tracing a loader."""
        return self._shadow(self._unprocessed)

    def live(self) -> dict[str, torch.Tensor]:
        """Return path -> tensor of the live layer."""
        return dict(self._tensors(self.layer))

    def process(self, inputs: Mapping[str, torch.Tensor], staged: Staged) -> dict[str, torch.Tensor]:
        """Process loaded weights on a shadow; return path -> tensor created by processing."""
        shadow = self._shadow(
            {key: like(tensor, inputs[f"{self.name}.{key}"]) for key, tensor in self._unprocessed.items()}
        )
        live = self.live()
        # no default device: with one, torch.compile fails on parameters of an engine's class
        with torch.no_grad():
            self._rules.process(shadow, staged)
        return {
            path: tensor
            for path, tensor in self._tensors(shadow)
            if path not in live or live[path].data_ptr() != tensor.data_ptr()
        }

    def _shadow(self, parameters: Mapping[str, torch.Tensor]) -> Any:
        shadow: Any = copied(self.layer)
        kept = shadow._parameters.keys() & self._rules.kept
        shadow._parameters = {key: shadow._parameters[key] for key in kept} | dict(parameters)
        shadow._buffers = {
            key: None if tensor is None else tensor.clone() for key, tensor in shadow._buffers.items()
        }
        _copy_helpers(shadow)
        return shadow

    def _tensors(self, layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (path, tensor) for the tensors of a layer and of its helper objects."""
        own = {key: value for key, value in vars(layer).items() if key not in MODULE_ATTRIBUTES}
        members = {**own, **layer._buffers, **layer._parameters}
        return _search(self.name, members, self._rules.searched, set())


def plan_of(
    model: nn.Module,
    layers_of: Callable[[Collection[str]], Collection[LayerProcessing]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    room: StagingRoom,
    model_dir: Path,
) -> AnyPlan | ShadowedPlan:
    """Plan the staging of a model; layers that the engine quantizes or repacks after loading get shadows.

    Args:
        model: model of the engine.
        layers_of: returns the processed layers in the engine's processing order. Its argument is the set of
            live parameters whose values differ from the loader's.
        shapes: checkpoint name -> shape of the whole tensor.
        dtype: dtype of the checkpoint tensors in the trace.
        model_dir: files that the live weights were loaded from.

    Raises:
        EngineError: the model cannot be staged; the message names the layer or parameter.
    """
    differing: set[str] = set()
    for _ in range(2):
        layers = list(layers_of(differing))
        loaded = _loading(model, layers)
        live, _, recorder = record(
            loaded.load_weights, loaded.named_parameters(remove_duplicate=False), shapes, dtype
        )
        plain = {name: tensor for name, tensor in live.items() if not tensor.is_meta}
        trace = LoaderTrace(plain, shapes, recorder.within(plain))
        differing = {parameter for parameter, _ in repacked(trace, model_dir)}
        if not differing:
            break
    check_loaded(trace, model_dir)
    if layers:
        return shadowed_plan(live, shapes, recorder, layers, room, model_dir)
    return make_plan(live, shapes, recorder, room)


def processings(
    model: nn.Module,
    rules: LayerRules,
    is_processed: Callable[[nn.Module, Mapping[str, torch.Tensor], bool], bool],
    differing: Collection[str],
) -> list[LayerProcessing]:
    """Return the processing of each layer whose live parameters differ from the loaded ones.

    Args:
        model: model of the engine.
        is_processed: (layer, its original parameters, whether a live value differs from the loader's) ->
            whether the layer is processed.
        differing: names of live parameters whose values differ from the loader's.
    """
    found: dict[int, LayerProcessing] = {}
    for name, layer in model.named_modules():
        names = {f"{name}.{key}" for key in layer._parameters}
        before = rules.unprocessed(layer)
        changed = not names.isdisjoint(differing)
        if rules.is_latent(layer) or (before and is_processed(layer, before, changed)):
            found[id(layer)] = LayerProcessing(name, layer, rules)
    return list(found.values())


def layouts(parameters: Mapping[str, torch.Tensor | None]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each of a layer's parameters."""
    return {key: (tensor.shape, tensor.dtype) for key, tensor in parameters.items() if tensor is not None}


def like(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return `data` as a parameter with the class and attributes of `parameter`."""
    tensor = data.detach()
    tensor.__class__ = parameter.__class__
    tensor.__dict__ = dict(parameter.__dict__)
    return tensor


def copied(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module, whose parameters, buffers and submodules can be replaced."""
    new: nn.Module = object.__new__(type(module))
    new.__dict__ = dict(vars(module))
    for members in ("_parameters", "_buffers", "_modules"):
        new.__dict__[members] = dict(vars(module)[members])
    return new


def with_staged(module: nn.Module | None, staged: Staged) -> nn.Module | None:
    """Return a copy of a module whose own parameters are the staged ones."""
    if module is None:
        return None
    new: Any = copied(module)
    new._parameters = {
        key: None if tensor is None else like(tensor, staged(tensor))
        for key, tensor in new._parameters.items()
    }
    return new


def _loading(model: nn.Module, layers: Collection[LayerProcessing]) -> Any:
    """Return a copy of the model in which `layers` are replaced by shadows for loading."""
    return _replaced(model, {id(one.layer): one.loading() for one in layers}, {})


def _replaced(module: nn.Module, shadows: Mapping[int, nn.Module], done: dict[int, nn.Module]) -> nn.Module:
    """Return a module with replaced submodules, or `module` itself if none is; `done` caches results."""
    if id(module) not in done:
        parts = {
            key: None if child is None else _replaced(child, shadows, done)
            for key, child in module._modules.items()
        }
        found = shadows.get(id(module), module)
        if found is module and any(part is not module._modules[key] for key, part in parts.items()):
            found = copied(module)
        if found is not module:
            found._modules = parts
        done[id(module)] = found
    return done[id(module)]


def _copy_helpers(owner: Any) -> None:
    """Copy the objects that process weights for `owner`, recursively."""
    for key, value in list(vars(owner).items()):
        if not isinstance(value, nn.Module | torch.Tensor | type) and callable(getattr(value, PROCESS, None)):
            vars(owner)[key] = helper = copy.copy(value)
            _copy_helpers(helper)


def _search(
    path: str, value: Any, searched: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
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
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith(searched):
        members = getattr(value, "__dict__", {})
    else:
        return
    for key, member in members.items():
        yield from _search(f"{path}.{key}", member, searched, seen)
