"""Runs AdamW on masters and moments in host memory, without copies on the device.

Results and checkpoints equal those of the optimizer on the device, so a run may switch between the two.

megatron's own HybridDeviceOptimizer needs CUDA and, for bfloat16, megatron's precision-aware distributed
optimizer.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from protocol.errors import SettingsError
from trainer.backends.host_transfers import HostSlice, Transfers, step_chunk
from trainer.config import OptimizerConfig
from trainer.megatron.optimizer import MasterPart, Optimizer, is_distributed
from trainer.megatron.parallel import Position


@dataclass(frozen=True, slots=True, eq=False)
class MasterSlice(HostSlice):
    """This rank's slice of a parameter: the whole parameter or, with the distributed optimizer, a share.

    The master has the parameter's shape for a whole parameter, otherwise [stop - start].
    """

    start: int
    stop: int
    """Range in the flat parameter."""

    @property
    def values(self) -> torch.Tensor:
        """The slice of the parameter, on the device."""
        return self.parameter.data.view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> torch.Tensor:
        """The slice of the gradient, on the device, in the dtype of gradient reduction."""
        return self.parameter.main_grad.view(-1)[self.start : self.stop]  # type: ignore[attr-defined]

    @property
    def is_of_experts(self) -> bool:
        """Whether the parameter is a stack of experts, which has other replicas than other parameters."""
        return not getattr(self.parameter, "allreduce", True)


class HostOptimizer(Optimizer):
    """AdamW with clipping, in host memory; implements the interface of `Optimizer`."""

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[Any],
        position: Position,
        dtype: torch.dtype,
        *,
        separate_masters: bool = False,
    ) -> None:
        """Build on wrapped chunks with loaded weights; arguments as in `Optimizer`.

        Raises:
            SettingsError: an engine would read the masters on the device.
        """
        if separate_masters:
            raise SettingsError(
                "setting optimizer.cpu_offload: with weights.transport 'shared' the engine reads the masters "
                "on the device; turn one of them off"
            )
        self.config, self.steps, self.masters = config, 0, {}
        self._chunks, self._distributed = list(chunks), is_distributed(position)
        self._parameters, self._fills = {}, True
        ordered = list(_slices(self._chunks, distributed=self._distributed))
        # as in megatron, norms and biases have no weight decay
        decayed = [part for part in ordered if part.parameter.ndim > 1]
        others = [part for part in ordered if part.parameter.ndim == 1]
        self._slices = [*decayed, *others]
        self._adam = torch.optim.AdamW(
            [
                {"params": [part.master for part in decayed], "weight_decay": config.weight_decay},
                {"params": [part.master for part in others], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        kind = ordered[0].gradient.dtype if ordered else dtype
        self._transfers = Transfers(ordered, position.device, gradient_dtype=kind, parameter_dtype=dtype)

    @property
    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._adam]

    def parts(self) -> Iterator[MasterPart]:
        for part in self._slices:
            yield MasterPart(part.parameter, part.start, part.stop, part.master, self._adam)

    @torch.no_grad()
    def step(self, lr_scale: float = 1.0) -> tuple[float, str]:
        self._unscale()
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate() * lr_scale
        norm = self._norm()
        if not math.isfinite(norm):
            return norm, f"overflow: gradient norm {norm}"
        factor = min(1.0, self.config.clip_grad / (norm + 1e-6)) if self.config.clip_grad > 0 else 1.0
        self.early.begin()
        for chunk, gradients in self._transfers.chunks(factor, self.early.add):
            step_chunk(self._adam, chunk, gradients)
        if self._distributed:
            for chunk in self._chunks:
                chunk.start_param_sync()
        self.steps += 1
        return norm, ""

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def _norm(self) -> float:
        """Return the L2 norm of the whole model's gradient, computed in float32."""
        dense = [part for part in self._slices if not part.is_of_experts]
        experts = [part for part in self._slices if part.is_of_experts]
        if self._distributed:
            return self._norm_of([*dense, *experts], mpu.get_intra_distributed_optimizer_instance_group())
        # each rank updates all of its parameters, and other ranks have other experts
        dense_norm = self._norm_of(dense, mpu.get_model_parallel_group())
        expert_norm = self._norm_of(experts, mpu.get_expert_tensor_model_pipeline_parallel_group())
        return math.sqrt(dense_norm**2 + expert_norm**2) if expert_norm else dense_norm

    def _norm_of(self, parts: Sequence[MasterSlice], group: dist.ProcessGroup) -> float:
        """Return the norm of the gradients of some slices over all ranks of a group."""
        norms = [
            torch.linalg.vector_norm(part.gradient, dtype=torch.float32)
            for part in parts
            if param_is_not_shared(part.parameter) and param_is_not_tensor_parallel_duplicate(part.parameter)
        ]
        device = self._transfers.device
        total = torch.stack(norms).norm() if norms else torch.zeros((), device=device)
        square = total.square()
        dist.all_reduce(square, group=group)
        return math.sqrt(float(square))


def _slices(chunks: Sequence[Any], *, distributed: bool) -> Iterator[MasterSlice]:
    """Yield this rank's slices in model order, which is also the export order."""
    for chunk in chunks:
        yield from _shares(chunk) if distributed else _wholes(chunk)


def _wholes(chunk: Any) -> Iterator[MasterSlice]:
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            master = parameter.detach().cpu().to(torch.float32, copy=True)
            yield MasterSlice(parameter, master, 0, parameter.numel())


def _shares(chunk: Any) -> Iterator[MasterSlice]:
    """Yield this rank's share of each parameter: equal ranges of megatron's buckets."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            share = bucket.grad_data.numel() // group.size()
            first = bucket.offset + group.rank() * share
            for parameter, (begin, end, _) in buffer.param_index_map.items():
                start, stop = max(begin, first) - begin, min(end, first + share) - begin
                if start < stop:
                    values = parameter.detach().view(-1)[start:stop]
                    master = values.cpu().to(torch.float32, copy=True)
                    yield MasterSlice(parameter, master, start, stop)
