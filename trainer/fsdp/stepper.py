"""Updates sharded parameters, with optimizer state on the device or in host memory.

Device parameters are float32 in both cases, so host masters are equal copies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from protocol.errors import SettingsError
from trainer.backends.host_transfers import HostSlice, Transfers, step_chunk
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.fsdp.layout import TENSOR_SIZE
from trainer.reference.optimizer_step import MasterStepper
from trainer.reference.shards import TENSOR, local_tensor, replica_count

LARGEST_DIFFERENCE = 0.05
"""Largest relative difference of gradients that are equal up to rounding."""
NEGLIGIBLE = 1e-6
"""Gradients below this share of the largest gradient are only rounding errors."""
CLIP_EPS = 1e-6
"""Added to the norm in the clipping factor, as in torch."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardSlice(HostSlice):
    """This rank's shard of a parameter."""

    @property
    def values(self) -> torch.Tensor:
        return local_tensor(self.parameter.detach()).view(-1)

    @property
    def gradient(self) -> torch.Tensor:
        found: Any = self.parameter.grad
        return local_tensor(found).view(-1)

    @property
    def has_gradient(self) -> bool:
        return self.parameter.grad is not None


class ShardStepper(MasterStepper):
    """Optimizer of shards in place; ranks reduce norms on the device of their passes."""

    def __init__(
        self, trained: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, mesh: DeviceMesh
    ) -> None:
        """Create the optimizer of float32 parameters, sharded over a mesh or whole."""
        super().__init__(trained, trained, config, ())
        ranks, tensor_ranks = mesh.size(), mesh[TENSOR].size()
        self._device, self._mesh = torch.device(mesh.device_type), mesh
        self._copies = {name: replica_count(p, ranks, tensor_ranks) for name, p in self.masters.items()}
        self._compared = tensor_ranks == 1

    @torch.no_grad()
    def _clip(self, limit: float) -> float:
        if not self._compared:
            self._compare_copies()
            self._compared = True
        shards: dict[int, list[torch.Tensor]] = {}
        for name, master in self.masters.items():
            if master.grad is not None:
                shards.setdefault(self._copies[name], []).append(local_tensor(master.grad))
        square = torch.zeros((), device=self._device)
        for copies, gradients in shards.items():
            square += torch.nn.utils.get_total_norm(gradients).square().to(self._device) / copies
        dist.all_reduce(square)
        norm = math.sqrt(float(square))
        if (factor := limit / (norm + CLIP_EPS)) < 1.0:
            torch._foreach_mul_([one for gradients in shards.values() for one in gradients], factor)
        return norm

    def _compare_copies(self) -> None:
        """Check that tensor-parallel ranks have equal gradients of unsharded parameters.

        Raises:
            SettingsError: gradients differ, because the plan reduces only some of them; the message names the
                first such parameter.
        """
        names = [name for name, p in self.masters.items() if self._copies[name] > 1 and p.grad is not None]
        found = []
        for name in names:
            own = local_tensor(self.masters[name].grad).to(self._device)  # type: ignore[arg-type]
            total = own.clone()
            dist.all_reduce(total, group=self._mesh.get_group(TENSOR))
            mean = total / self._mesh[TENSOR].size()
            found.append(torch.stack([(own - mean).norm(), mean.norm()]))
        norms = torch.stack(found)
        dist.all_reduce(norms, dist.ReduceOp.MAX)
        least = NEGLIGIBLE * float(norms[:, 1].max())
        for name, (difference, norm) in zip(names, norms.tolist(), strict=True):
            if difference > LARGEST_DIFFERENCE * max(norm, least):
                raise SettingsError(
                    f"setting {TENSOR_SIZE}: {self._mesh[TENSOR].size()}: ranks have different gradients of "
                    f"{name}, so transformers' plan for this type of model is incomplete; set it to 1"
                )


class HostStepper(ShardStepper):
    """Optimizer in host memory for device parameters, with the interface of `MasterStepper`.

    The gradient norm is computed on the device; the host steps one chunk of gradients at a time.
    """

    def __init__(
        self, trained: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, mesh: DeviceMesh
    ) -> None:
        """Copy this rank's shards from the device of its passes to the host."""
        self._host_shards = {
            name: torch.nn.Parameter(local_tensor(parameter.detach()).cpu().clone())
            for name, parameter in trained.items()
        }
        super().__init__(trained, config, mesh)
        _fuse(self.optimizer)
        slices = [ShardSlice(parameter, self._host_shards[name]) for name, parameter in trained.items()]
        self._transfers = Transfers(
            slices, self._device, gradient_dtype=torch.float32, parameter_dtype=torch.float32
        )

    def stepped(self, name: str) -> torch.nn.Parameter:
        return self._host_shards[name]

    def loaded(self) -> None:
        for name, parameter in self.masters.items():
            self._host_shards[name].detach().copy_(local_tensor(parameter.detach()))

    def tensors(self) -> list[torch.Tensor]:
        return list(self.masters.values())

    @torch.no_grad()
    def _apply(self) -> None:
        for chunk, gradients in self._transfers.chunks(1.0, lambda parameters, event: None):
            step_chunk(self.optimizer, chunk, gradients)


class HostShardStepper(ShardStepper):
    """Optimizer of shards that are in host memory."""

    def __init__(
        self, trained: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, mesh: DeviceMesh
    ) -> None:
        """Create the optimizer of parameters in host memory."""
        super().__init__(trained, config, mesh)
        _fuse(self.optimizer)

    def tensors(self) -> list[torch.Tensor]:
        return []


def make_stepper(
    trained: Mapping[str, torch.nn.Parameter],
    config: OptimizerConfig,
    trainer: TrainerConfig,
    mesh: DeviceMesh,
) -> MasterStepper:
    """Return the optimizer of float32 parameters, sharded or whole, that passes use on a device."""
    if not config.cpu_offload:
        return ShardStepper(trained, config, mesh)
    kind = HostShardStepper if trainer.offload_parameters else HostStepper
    return kind(trained, config, mesh)


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    """Enable torch's fused AdamW, which reads masters and moments in host memory once per step."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.AdamW) else ():
        group["fused"] = True
