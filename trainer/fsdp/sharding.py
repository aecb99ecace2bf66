"""Shards modules of transformers over the data-parallel ranks, layer by layer."""

import functools
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

from trainer.config import TrainerConfig
from trainer.reference.backend import DTYPES


def shard(root: torch.nn.Module, model: Any, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
    """Shard a module layer by layer: a pass gathers one layer at a time, in the dtype of training.

    Gradients are added up over ranks and passes in float32. Parameters without a gradient stay as they are.

    Args:
        root: the model, or the module around it that is called.
        model: of transformers; it names the layers that belong together.
        mesh: the data-parallel ranks.
        trainer: says the dtype, whether layers are compiled, whether the backward pass computes them again,
            and whether shards with a gradient are in host memory.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    dtype = DTYPES[trainer.dtype] if trained and trainer.dtype != "float32" else None
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
    place = OffloadPolicy()
    if trained and trainer.offload_parameters:
        place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    names = set(model._no_split_modules or ())
    for layer in [module for module in model.modules() if type(module).__name__ in names]:
        if trainer.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if trained and trainer.recompute_granularity == "full":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=place)
    fully_shard(root, mesh=mesh, mp_policy=policy, offload_policy=place)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are shares of the whole step's
            module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing while it adds up
