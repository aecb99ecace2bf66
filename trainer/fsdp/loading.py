"""Loads transformers models onto the ranks that shard them; a rank reads only its own shards.

A model is built on the meta device, sharded, and then given its parameters. A first copy, float32 in host
memory, determines the traits that the layout of the passes depends on.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from protocol.device.checkpoint_views import model_tensors
from protocol.errors import SettingsError
from protocol.weights.boxes import whole
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.config import AttentionBackend, TrainerConfig
from trainer.fsdp.layout import TENSOR_SIZE
from trainer.fsdp.sharding import divide, shard
from trainer.fsdp.shards import ShardPlan, TensorView, shard_rows, tensor_views
from trainer.fsdp.traits import Traits, probe
from trainer.layers.attention.terms import LIBRARIES
from trainer.reference.backend import DTYPES
from trainer.reference.frozen import load_model
from trainer.reference.shards import DATA, TENSOR, local_tensor, tensor_cut, tensor_parallel_part

log = logging.getLogger("tether.trainer")

Tensors = Mapping[str, torch.Tensor]


def load_shards(
    model_dir: Path, setting: str, mesh: DeviceMesh, trainer: TrainerConfig, *, with_head: bool = True
) -> tuple[Tensors, Traits]:
    """Return this rank's shards of a model, float32, in host memory, and the model's traits. A collective.

    Args:
        setting: name of the directory's setting, for error messages.
        with_head: whether the model has its output layer.

    Raises:
        SettingsError: transformers cannot load the model, its tensor-parallel plan fails, the model is not a
            decoder, its outputs are not finite, or `trainer.attention_backend` does not support the model.
    """
    model = load_model(model_dir, setting, with_head=with_head, blank=True)
    plain = replace(
        trainer, dtype="float32", compile=False, fp8="off", recompute_granularity="", offload_parameters=True
    )
    model._can_set_attn_implementation()  # caches what `probe` needs from the class's source
    divide(model, mesh)
    shard(model, model, mesh, plain)
    tensors, conversions = _read(model, model_dir, mesh), None
    if tensors is None:
        log.warning("trainer.whole model=%s reason='its files have no range for each shard'", model_dir)
        full = load_model(model_dir, setting, with_head=with_head)
        tensors, conversions = _cut(model, model_tensors(full), mesh), full._weight_conversions
    assign_shards(model, tensors, torch.device("cpu"))
    device, ranks = torch.device(mesh.device_type), mesh[TENSOR].size()
    try:
        traits = probe(model, device, DTYPES[trainer.dtype], divided=ranks > 1)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if ranks == 1 or isinstance(error, (torch.OutOfMemoryError, SettingsError)):
            raise
        kind = model.config.get_text_config().model_type
        raise SettingsError(
            f"setting {TENSOR_SIZE}: {ranks}: a pass by transformers' plan for model_type {kind!r} fails: "
            f"{error}"
        ) from error
    _check_traits(traits, model.config.model_type, f"{setting} {model_dir}", trainer.attention_backend)
    return tensors, replace(traits, conversions=conversions)


def _check_traits(traits: Traits, model_type: str, place: str, attention: AttentionBackend) -> None:
    """Refuse a model that this backend cannot train; `place` is its setting and directory."""
    if not traits.is_finite:
        raise SettingsError(f"{place}: its outputs for a few tokens are not finite; look for damaged weights")
    if not traits.is_causal:
        raise SettingsError(
            f"{place}: model_type {model_type!r} is not causal, "
            "and the trainer needs a model that reads from left to right"
        )
    if traits.why_rows and attention in LIBRARIES:
        raise SettingsError(
            f"setting trainer.attention_backend: {attention}: it computes packed samples, "
            f"and model_type {model_type!r} has padded rows: {traits.why_rows}; use auto"
        )


def assign_shards(model: Any, tensors: Tensors, device: torch.device) -> None:
    """Replace a model's meta parameters by shards, on a device, in the parameters' dtypes."""
    held: dict[str, torch.Tensor] = {}
    tied = model.all_tied_weights_keys
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (source := tied.get(name, name)) in tensors:
            if source not in held:
                value = tensors[source].to(device, parameter.dtype)
                held[source] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
            held[name] = held[source]
    model.load_state_dict(held, assign=True, strict=False)
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])


def _read(model: Any, model_dir: Path, mesh: DeviceMesh) -> Tensors | None:
    """Read this rank's shards; None if the files lack a range that equals the shard or a part of it.

    Quantised checkpoints are left to transformers, which reads their scales.
    """
    if getattr(model.config, "quantization_config", None):
        return None
    sharded = model_tensors(model)
    try:
        views, files = tensor_views(model, sharded, mesh), SafetensorsReader(model_dir)
    except SettingsError:  # a tensor is not a view of a parameter, or the model has other files
        return None
    split = [view for view in views if isinstance(sharded[view.parameter], DTensor)]
    plan = ShardPlan.make(split, sharded, mesh)
    with files as reader:
        names = {view.name: _name_in(reader, view, model.base_model_prefix) for view in views}
        if plan is None or not all(names.values()):
            return None
        tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in sharded.items()}
        rank, tensor_rank = mesh.get_local_rank(DATA), mesh.get_local_rank(TENSOR)
        pieces = plan.parts[rank]
        for piece, (name, memory) in zip(pieces, plan.cut(tensors, rank, pieces), strict=True):
            box = plan.views[piece.tensor].moved(piece.box, tensor_rank)
            memory.copy_(reader.box(names[name], box))
        for view in views:
            if view not in split:
                view.within(tensors[view.parameter]).copy_(reader.box(names[view.name], whole(view.shape)))
    return tensors


def _name_in(reader: SafetensorsReader, view: TensorView, prefix: str) -> str:
    """Return a tensor's name in the files, possibly with the prefix of an outer model; empty: missing."""
    for name in (view.name, f"{prefix}.{view.name}"):
        if name in reader.names and reader.shape(name) == view.whole:
            return name
    return ""


def _cut(model: Any, loaded: Tensors, mesh: DeviceMesh) -> Tensors:
    """Return this rank's shards of a fully loaded model."""
    tensors = {}
    for name, tensor in model_tensors(model).items():
        tensors[name] = torch.empty_like(tensor, device="cpu")
        source = loaded[name]
        if isinstance(tensor, DTensor):
            source = tensor_parallel_part(
                source, tensor_cut(tensor), mesh.get_local_rank(TENSOR), mesh[TENSOR].size()
            )
            first, stop = shard_rows(len(source), mesh.get_local_rank(DATA), mesh[DATA].size())
            source = source[first:stop]
        local_tensor(tensors[name]).copy_(source)
    return tensors
