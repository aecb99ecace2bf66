"""Adapters for an engine without kernels for them: staging fetches A and B, and what is committed are the
weights with them merged."""

from collections.abc import Mapping

import torch

from protocol.messages import WeightManifest
from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from rollout.staging.releasable_memory import check_room
from rollout.staging.staging import Staging, whole_source


class MergedStaging(Staging):
    """`copy` holds, once a version is staged, W + B A for every weight that has an adapter; W is kept in
    `base`, A and B in `adapter`."""

    def __init__(
        self, live: Mapping[str, torch.Tensor], lora: LoraConfig, *, architecture: str, staging_mb: int = 0
    ) -> None:
        """`live`: the model's parameters, as they are without an adapter.

        Raises:
            SettingsError: if the model lacks a target module.
            EngineError: if there is no room for a copy of those that have an adapter, or it may not take
                that much.
        """
        self._targets = adapter_targets({name: tuple(tensor.shape) for name, tensor in live.items()}, lora)
        check_room([live[target.weight] for target in self._targets], staging_mb)
        self.base = {target.weight: live[target.weight].clone() for target in self._targets}
        self.copy = {name: torch.empty_like(tensor) for name, tensor in self.base.items()}
        like = next(iter(self.base.values()))
        self.adapter = {
            name: like.new_empty(shape) for name, shape in adapter_shapes(self._targets, lora.rank).items()
        }
        super().__init__(
            {name: whole_source(tensor) for name, tensor in self.adapter.items()}, architecture=architecture
        )

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        covered = super().fetch(manifest, deadline_s)
        with torch.no_grad():
            for target in self._targets:
                change = self.adapter[target.b].float() @ self.adapter[target.a].float()
                self.copy[target.weight].copy_(self.base[target.weight].float() + change)
        return covered
