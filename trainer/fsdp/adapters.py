"""Shards adapters over tensor-parallel ranks, following transformers' plan for the adapted layers.

For a row-sharded weight, a rank has its rows of B and the whole A; the gradients of A's results are partial
sums. For a column-sharded weight, a rank has its columns of A and the whole B; A's results are partial sums.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from trainer.reference.lora import LowRank
from trainer.reference.shards import TENSOR, Cut, local_tensor, tensor_cut, tensor_parallel_part


class DividedLowRank(LowRank):
    """Shard of one adapter on a rank, with the inputs and outputs of the layer's shard."""

    def __init__(self, layer: Any, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        """Shard A or B of an adapter, which are given whole; the layer is already sharded."""
        super().__init__(layer, a, b, scaling)
        self._cut: Cut | None = tensor_cut(layer.weight)
        if self._cut is None:
            return
        self._mesh: DeviceMesh = layer.weight.device_mesh
        place, half = layer.weight.placements, "b" if self._cut[0] == 0 else "a"
        rank = self._mesh.get_local_rank(TENSOR)
        part = tensor_parallel_part(getattr(self, half).detach(), self._cut, rank, self._mesh.size())
        divided = DTensor.from_local(part.contiguous(), self._mesh, place, run_check=False)
        setattr(self, half, torch.nn.Parameter(divided))

    def added(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        own = self(x)
        if own.shape[-1] != output.shape[-1]:  # the plan gathers the layer's output
            own = _redistributed(own, self._mesh, Shard(-1), Replicate())
        return output + own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._cut is None:
            return super().forward(x)
        a, b = local_tensor(self.a), local_tensor(self.b)
        if self._cut[0] == 0:
            low = F.linear(self.dropped(x), a)
            alike = DTensor.from_local(low, self._mesh, [Replicate()], run_check=False)
            return self.scaling * F.linear(alike.to_local(grad_placements=[Partial()]), b)
        if x.shape[-1] != a.shape[-1]:  # the plan divides the layer's input
            x = _redistributed(x, self._mesh, Replicate(), Shard(-1))
        rank, ranks = self._mesh.get_local_rank(TENSOR), self._mesh.size()
        low = _redistributed(F.linear(self.dropped(x, rank, ranks), a), self._mesh, Partial(), Replicate())
        return self.scaling * F.linear(low, b)


def _redistributed(
    tensor: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement
) -> torch.Tensor:
    """Return this rank's shard of a tensor after redistributing it from one placement to another."""
    placed = DTensor.from_local(tensor, mesh, [source], run_check=False)
    return placed.redistribute(placements=[target]).to_local()
