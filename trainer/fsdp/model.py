"""Shards transformers models over the data-parallel ranks, and computes log-probabilities with them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

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

from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.fsdp.output_layer import OutputLayer, Tokens
from trainer.fsdp.passes import Pass, Passes
from trainer.functional.logprobs import token_logprobs
from trainer.reference.backend import DTYPES
from trainer.reference.frozen import in_dtype

T = TypeVar("T")


class ShardedModel:
    """A causal language model, and the passes that compute log-probabilities of a batch with it.

    Shapes: k tokens that a pass asks for.
    """

    def __init__(self, model: Any, mesh: DeviceMesh, trainer: TrainerConfig, *, trained: bool) -> None:
        """Shard a model. A collective.

        Args:
            model: of transformers, float32, on the CPU, equal on every rank.
            mesh: the data-parallel ranks.
            trainer: dtype and size of the passes, and whether they compute layers again.
            trained: whether it has gradients and float32 masters; else it is in the dtype of the passes.
        """
        self.module = model
        self._output = OutputLayer.take_over(model)
        self.passes = Passes(model, mesh, trainer)
        if not trained:
            in_dtype(model.requires_grad_(False), DTYPES[trainer.dtype])
        shard(model, model, mesh, trainer)

    def run(
        self,
        one: Pass,
        part: Batch,
        place: torch.Tensor,
        finish: Callable[[torch.Tensor, torch.Tensor], T],
    ) -> T:
        """Make a pass, and return what `finish` makes of it. A collective.

        Args:
            one: the pass.
            part: its samples, on the device.
            place: int64 [k], the tokens of the part that are asked for.
            finish: (log-probabilities [k], entropies [k]) -> result; it may run the backward pass.
        """
        with self.passes.inputs(one, part) as inputs:
            tokens = Tokens(inputs.rows[place], part.tokens[place].long(), part.temperature)
            return finish(*self._logprobs(inputs.arguments, tokens))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of a batch's sampled tokens, 0 elsewhere: float32 [t], on the CPU."""
        out = torch.zeros(len(batch.tokens))
        for one in self.passes.divide(batch):
            part = batch.select(one.samples).to(self.passes.device)
            logprobs = self.run(one, part, part.sampled_mask.nonzero()[:, 0], lambda logprobs, _: logprobs)
            out[batch.sampled_mask & torch.isin(batch.sample_index, one.samples)] = logprobs.cpu()
        # Only a backward pass does that for the root module, which would keep its weights over a step.
        self.module.reshard()
        return out

    def _logprobs(
        self, arguments: dict[str, torch.Tensor], tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._output is not None:
            return self._output.logprobs(self.module, arguments, tokens)
        logits = self.module(**arguments, use_cache=False).logits.flatten(0, 1)
        return token_logprobs(logits.index_select(0, tokens.rows), tokens.targets, tokens.temperature)


def shard(root: torch.nn.Module, model: Any, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
    """Shard a module layer by layer: a pass gathers one layer at a time, in the dtype of training.

    Gradients are added up over ranks and passes in float32. Parameters without a gradient stay as they are.

    Args:
        root: what is called, the model or a module around it.
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
