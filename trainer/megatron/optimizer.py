"""Wraps megatron's optimizer: AdamW on float32 masters.

With `use_distributed_optimizer`, its state is sharded over data-parallel and context ranks.

The master of a parameter is its `main_param`. megatron sets it for 16-bit parameters; float32 parameters have
no `main_param` unless masters are separate.

The loss scale keeps float16 gradients from overflow and underflow, as in Micikevicius et al. 2018 (arXiv
1710.03740), with one difference: a step that overflows is repeated with half the scale instead of skipped, so
every version trains its batch. The scale is a power of two, so scaling and unscaling are exact in float16.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import local_multi_tensor_l2_norm

from trainer.backends.early_export import EarlyExport
from trainer.config import OptimizerConfig
from trainer.functional.learning_rate import learning_rate
from trainer.megatron.cpu import cuda_type_names
from trainer.megatron.parallel import Position

log = logging.getLogger("tether.trainer")
T = TypeVar("T")
SMALLEST = 1.0
"""Smallest loss scale. Scales below 1 would shrink the loss, which float32 gradients never need."""


class LossScale:
    """Dynamic loss scale; equal on every rank, because the gradient norm is."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.value = 2.0 ** round(math.log2(config.initial_loss_scale))
        """Current loss scale."""
        self.finite_steps = 0
        """Number of steps since the scale changed."""
        self._window = config.loss_scale_window

    def repeated(self, attempt: Callable[[], tuple[T, float]]) -> tuple[T, int]:
        """Run a step, repeating it with half the scale while its gradient is not finite.

        If the gradient is not finite at the smallest scale either, the scale is not the cause, and is
        restored.

        Args:
            attempt: runs the whole step with the current scale, or has no effect if the gradient is not
                finite; returns its result and the gradient norm.

        Returns:
            Result of the last attempt, and the number of attempts before it.
        """
        before, repeats = self.value, 0
        while True:
            made, norm = attempt()
            if math.isfinite(norm):
                self._count(repeats)
                return made, repeats
            if self.value <= SMALLEST:
                self.value = before
                return made, repeats
            log.info("loss_scale.overflow scale=%g next=%g", self.value, self.value / 2)
            self.value, repeats = self.value / 2, repeats + 1

    def _count(self, repeats: int) -> None:
        """Double the scale after a full window of steps without a change."""
        self.finite_steps = 1 if repeats else self.finite_steps + 1
        if self.finite_steps >= self._window:
            self.value, self.finite_steps = self.value * 2, 0


def wrap_model(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    position: Position,
    *,
    grad_reduce_in_fp32: bool = True,
) -> list[Any]:
    """Wrap the chunks of a rank in megatron's DistributedDataParallel, which reduces gradients.

    Gradients are reduced in float32 or in the parameters' dtype: during the backward pass of the last
    micro-batch with `overlap_grad_reduce`, otherwise after it.
    """
    overlaps = position.config.overlap_grad_reduce and position.copies > 1
    config.finalize_model_grads_func = _finalize_gradients
    _install_norm()
    wrapped = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=grad_reduce_in_fp32,
                use_distributed_optimizer=is_distributed(position),
                overlap_grad_reduce=overlaps,
            ),
            chunk,
            disable_bucketing=number > 0,  # as in megatron: passes of the first chunk hide this communication
        )
        for number, chunk in enumerate(chunks)
    ]
    if overlaps:
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return wrapped


def is_distributed(position: Position) -> bool:
    """Return whether optimizer state is sharded.

    Sharding a single copy is pointless and costs copies.
    """
    return position.config.use_distributed_optimizer and position.copies > 1


@dataclass(frozen=True, slots=True, eq=False)
class MasterPart:
    """Part of a parameter that this rank updates."""

    parameter: torch.Tensor
    start: int
    stop: int
    """Range of the part in the flat parameter."""
    master: torch.Tensor
    """Tensor that the optimizer updates, with the elements of the range."""
    optimizer: torch.optim.Optimizer
    """Optimizer of `master`, with its moments."""

    def forget(self) -> None:
        """Drop the moments, which resets them to before the first step."""
        self.optimizer.state.pop(self.master, None)

    def set(self, kind: str, values: torch.Tensor, steps: int) -> None:
        """Set the master or a moment.

        Args:
            kind: master, exp_avg or exp_avg_sq.
            values: float32, flat.
            steps: number of steps in the moments.
        """
        values = values.view(self.master.shape)
        if kind == "master":
            self.master.detach().copy_(values)
            return
        group = next(g for g in self.optimizer.param_groups if any(p is self.master for p in g["params"]))
        state: dict[str, Any] = self.optimizer.state[self.master]
        state[kind] = values.to(self.master.device, copy=True)
        if isinstance(self.optimizer, torch.optim.AdamW):
            device = self.master.device if group.get("fused") else torch.device("cpu")
            state["step"] = torch.tensor(float(steps), device=device)
        else:  # TransformerEngine and Apex count steps by group
            group["step"] = steps


class Optimizer:
    """AdamW with gradient clipping."""

    loss_scale: LossScale | None = None
    """Loss scale, by which gradients are divided before a step; None: 1."""
    early = EarlyExport()
    """Export of the next version during the step; this optimizer updates all parameters at once."""

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[Any],
        position: Position,
        dtype: torch.dtype,
        *,
        separate_masters: bool = False,
    ) -> None:
        """Build on wrapped chunks with loaded weights, of which masters are copies. A collective.

        Args:
            config: settings of AdamW.
            chunks: result of `wrap_model`.
            position: this rank's position in the layout.
            separate_masters: whether masters are separate, and of whole parameters, for float32 too.
        """
        self.config, self._chunks = config, list(chunks)
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            # float16 too: the flag only requests separate masters here; `LossScale` scales the loss
            bf16=dtype is not torch.float32,
            params_dtype=dtype,
            use_distributed_optimizer=is_distributed(position),
        )
        with cuda_type_names():
            self.megatron = get_megatron_optimizer(settings, self._chunks, use_gloo_process_groups=False)
        self.steps = 0
        self._fills = True
        parameters = chunks[0].module.named_parameters() if separate_masters else ()
        self._parameters: dict[str, Any] = dict(parameters)
        if separate_masters and dtype is torch.float32:
            for optimizer in self.torch_optimizers:
                _detach_masters(optimizer)
        self.masters: dict[str, torch.Tensor] = {
            name: parameter.main_param for name, parameter in self._parameters.items()
        }
        """Parameter -> master; empty unless masters are separate."""
        for group in self.megatron.param_groups:
            # megatron marks parameters without weight decay, but only its own scheduler reads the marks.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            if isinstance(self._inner[0].optimizer, torch.optim.AdamW):
                group["fused"] = True

    @property
    def _inner(self) -> list[Any]:
        return list(self.megatron.chained_optimizers)

    @property
    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Wrapped torch optimizers, which hold masters and moments of this rank's share."""
        return [inner.optimizer for inner in self._inner if inner.optimizer is not None]

    def parts(self) -> Iterator[MasterPart]:
        """Yield the part of each trained parameter that this rank updates."""
        for inner in self._inner:
            if inner.optimizer is None:
                continue
            if isinstance(inner, DistributedOptimizer):
                yield from _shards(inner)
            else:
                parameters = [
                    parameter for group in inner.optimizer.param_groups for parameter in group["params"]
                ]
                owners = {
                    id(getattr(parameter, "main_param", parameter)): parameter
                    for chunk in self._chunks
                    for parameter in chunk.parameters()
                }
                for master in parameters:
                    yield MasterPart(owners[id(master)], 0, master.numel(), master, inner.optimizer)

    def tensors(self) -> list[torch.Tensor]:
        """Return masters and moments of this rank's share."""
        found = [
            parameter
            for inner in self.torch_optimizers
            for group in inner.param_groups
            for parameter in group["params"]
        ]
        states = [state for inner in self.torch_optimizers for state in inner.state.values()]
        return found + [
            value for state in states for value in state.values() if isinstance(value, torch.Tensor)
        ]

    def stop_filling_parameters(self) -> None:
        """Stop writing parameters: the engine that owns them copies the masters."""
        self._fills = False

    @torch.no_grad()
    def fill_parameters(self) -> None:
        """Copy separate masters to the parameters, unless an engine does."""
        for name, parameter in self._parameters.items() if self._fills else ():
            parameter.copy_(self.masters[name])

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self.config, self.steps)

    def step(self, lr_scale: float = 1.0) -> tuple[float, str]:
        """Run one step with the gradients of the last backward pass.

        Args:
            lr_scale: factor of the learning rate.

        Returns:
            Gradient norm before clipping, and the reason if the step was skipped, else "".
        """
        optimizer = self.megatron
        self._unscale()
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate() * lr_scale
        overflow = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if overflow or not math.isfinite(norm):
            return norm, f"overflow: gradient norm {norm}"
        if self.config.clip_grad > 0:
            self._scale_gradients(self.config.clip_grad / (norm + 1e-6))
        if self.masters:
            for inner in self.torch_optimizers:
                inner.step()
            self.fill_parameters()
        else:
            optimizer.step_with_ready_grads()
        self.steps += 1
        return norm, ""

    def zero_grad(self) -> None:
        """Zero the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def _unscale(self) -> None:
        """Divide the gradients, which are float32 at this point, by the loss scale."""
        if self.loss_scale is not None:
            for chunk in self._chunks:
                chunk.scale_gradients(1.0 / self.loss_scale.value)

    def _scale_gradients(self, factor: float) -> None:
        if factor >= 1.0:
            return
        gradients = [p.grad for inner in self._inner for p in inner.get_parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)


def _install_norm() -> None:
    """Let megatron compute the norm of all gradients with torch's multi-tensor kernels.

    megatron needs an extension for multi-tensor norms. Without it, the host waits for the norm of every
    tensor.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_all


def _norm_of_all(
    chunk: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], *unused: Any
) -> tuple[torch.Tensor, None]:
    """Return the norm of tensors, float32 [1], on their device. Signature of Apex's kernel."""
    norms = torch._foreach_norm(tensors[0], 2.0, torch.float32)
    return torch.stack(norms).norm().view(1), None


def _finalize_gradients(model: list[Any], num_tokens: torch.Tensor | None, **groups: Any) -> None:
    """Reduce gradients over ranks as megatron does, without dividing by tokens: the loss is a sum."""
    finalize_model_grads(model, None, **groups)


def _shards(inner: DistributedOptimizer) -> Iterator[MasterPart]:
    """Yield this rank's ranges of the parameters of a distributed optimizer."""
    pairs = (
        (inner.model_fp32_groups, inner.shard_fp32_groups),
        (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
    )
    for groups, masters_of_groups in pairs:
        for group, masters in zip(groups, masters_of_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                found = inner._get_model_param_range_map(parameter)["param"]
                yield MasterPart(parameter, found.start, found.end, master, inner.optimizer)


def _detach_masters(optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's parameters by copies, with the same gradients and megatron attributes."""
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            master = parameter.detach().clone()
            master.main_grad = parameter.main_grad
            copy_tensor_model_parallel_attributes(master, parameter)
            if hasattr(parameter, "shared"):
                master.shared = parameter.shared
            group["params"][position] = parameter.main_param = master
