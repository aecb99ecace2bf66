"""Merges LoRA adapters into the weights, for an engine without adapter kernels.

Staging fetches A and B; a commit copies the merged weights.
"""

from collections.abc import Mapping

import torch

from protocol.messages import WeightManifest
from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from rollout.staging.places import StagingRoom, choose
from rollout.staging.staging import Staging, whole_source


class MergedStaging(Staging):
    """Staging of merged weights.

    Once a version is staged, `copy` holds W + B A for every weight that has an adapter. `base` keeps W, and
    `adapter` A and B.
    """

    def __init__(
        self, live: Mapping[str, torch.Tensor], lora: LoraConfig, *, architecture: str, staging_mb: int = 0
    ) -> None:
        """Allocate the copies.

        Args:
            live: the model's parameters, without an adapter.
            lora: the adapter that versions bring.
            architecture: class of the model in transformers.
            staging_mb: see `EngineConfig`.

        Raises:
            SettingsError: if the model lacks a target module.
            EngineError: if there is no room for a copy of the weights that have an adapter, or it takes more
                than `staging_mb`.
        """
        self._targets = adapter_targets({name: tuple(tensor.shape) for name, tensor in live.items()}, lora)
        choose(StagingRoom(mb=staging_mb), [live[target.weight] for target in self._targets], 0)
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
