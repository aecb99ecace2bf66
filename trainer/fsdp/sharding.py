"""Shards transformers layers over tensor-parallel ranks, and then over data-parallel ranks."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from protocol.errors import SettingsError
from trainer.config import TrainerConfig
from trainer.fsdp.layout import TENSOR_SIZE, division_refusal
from trainer.fsdp.memory.expected import stays_gathered
from trainer.layers.fp8 import use_fp8
from trainer.memory.expected import ITEM_BYTES
from trainer.reference.backend import DTYPES
from trainer.reference.shards import DATA, TENSOR, local_tensor, tensor_cut


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Shard the layers over the tensor-parallel ranks by transformers' plan for the model.

    Embedding and output layer stay whole, because the output layer computes log-probabilities.

    Raises:
        SettingsError: the model has no plan, or a part of the model cannot be sharded.
    """
    ranks = mesh[TENSOR].size()
    if ranks == 1:
        return
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    whole = {name for name, module in model.named_modules() if any(module is table for table in tables)}
    plan = {name: style for name, style in model.tp_plan.items() if name not in whole}
    refusal = division_refusal(plan, model.config.get_text_config().to_dict(), ranks)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not refusal:
        try:
            apply_tensor_parallelism(model, mesh[TENSOR], plan)
        except ValueError as error:
            refusal = str(error)
    for name, parameter in model.named_parameters():
        dim, parts = tensor_cut(parameter) or (0, 1)
        if not refusal and tensor_cut(parameter) and shapes[name][dim] % (parts * ranks):
            refusal = f"it does not divide {name} {shapes[name]} along dimension {dim}"
    if refusal:
        raise SettingsError(f"setting {TENSOR_SIZE}: {ranks}: {refusal}; use another number")


def shard(root: torch.nn.Module, model: Any, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
    """Shard a module by layers: a pass gathers one layer at a time, in the training dtype.

    Gradients are summed over ranks and passes in float32. A frozen model keeps its dtype.

    Args:
        root: the model, or the module around it that is called.
        model: transformers model; it names the layers to keep together.
        trainer: dtype, compilation, recomputation, offloading of trained shards, and FP8.

    Raises:
        SettingsError: as `use_fp8`.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    dtype = DTYPES[trainer.dtype] if trained and trainer.dtype != "float32" else None
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
    place = OffloadPolicy()
    if trained and trainer.offload_parameters:
        place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    if trained and trainer.fp8 != "off":
        use_fp8(model, trainer, mesh.device_type)
    data = mesh[DATA]
    for layer in _layers(model):
        if trainer.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if trained and trainer.recompute_granularity == "full":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=data, mp_policy=policy, offload_policy=place)
    fully_shard(root, mesh=data, mp_policy=policy, offload_policy=place)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # each loss is already a share of the whole step's loss
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support a factor in reductions


@contextmanager
def resharded_at_end(root: torch.nn.Module, mesh: DeviceMesh, trainer: TrainerConfig) -> Iterator[None]:
    """Reshard a module after the block; within, its parameters stay gathered between passes if small.

    The root's parameters stay gathered after any pass without gradients.
    """
    item, data_ranks = ITEM_BYTES[trainer.dtype], mesh[DATA].size()
    nbytes = item * sum(local_tensor(parameter).numel() for parameter in root.parameters())
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    stay = stays_gathered(nbytes, data_ranks, trainer)
    _reshard_after_pass(modules, is_wanted=not stay)
    try:
        yield
    finally:
        _reshard_after_pass(modules, is_wanted=True)
    for module in modules:
        module.reshard()


def _reshard_after_pass(modules: Sequence[FSDPModule], *, is_wanted: bool) -> None:
    """Set whether passes free parameters; the root (first) keeps its own until the backward pass."""
    for number, module in enumerate(modules):
        module.set_reshard_after_backward(is_wanted, recurse=False)
        if number:
            module.set_reshard_after_forward(is_wanted, recurse=False)


def _layers(model: Any) -> list[torch.nn.Module]:
    """Return the outermost modules that transformers does not split.

    A module whose parameters are also in other modules, such as a tied embedding, is left to the root: two
    groups would create two separate parameters.
    """
    names, everywhere = set(model._no_split_modules or ()), _uses(model)
    found, within = [], set[torch.nn.Module]()
    for module in model.modules():
        if type(module).__name__ not in names or module in within:
            continue
        if all(everywhere[parameter] == count for parameter, count in _uses(module).items()):
            found.append(module)
            within |= set(module.modules())
    return found


def _uses(module: torch.nn.Module) -> Counter[torch.nn.Parameter]:
    """Return how often each parameter occurs in a module and its submodules."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
