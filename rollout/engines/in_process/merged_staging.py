"""Stages adapter versions by merging them into the base weights, for engines without adapter layers."""

from collections.abc import Mapping, Sequence

import torch

from protocol.messages import WeightManifest
from protocol.weights.lora import AdapterTarget, adapter_shapes
from rollout.staging.staging import Staging, whole_source
from rollout.weights.base import WeightReceiver
from rollout.weights.verification import Deadline


class MergedStaging(Staging):
    """Staging of merged weights.

    After staging, `copy` contains W + B A for every weight with an adapter, `base` contains W, and `adapter`
    contains A and B.
    """

    def __init__(
        self,
        targets: Sequence[AdapterTarget],
        rank: int,
        *,
        base: Mapping[str, torch.Tensor],
        copy: Mapping[str, torch.Tensor],
        architecture: str,
    ) -> None:
        """Allocate A and B.

        Args:
            targets: weights with an adapter.
            base: checkpoint name -> W of each target; read-only.
            copy: destination of merged weights, in the layout of `base`.
            architecture: class name of the model in transformers.
        """
        self._targets, self.base, self.copy = targets, dict(base), dict(copy)
        like = next(iter(self.base.values()))
        self.adapter = {
            name: like.new_empty(shape) for name, shape in adapter_shapes(list(targets), rank).items()
        }
        super().__init__(
            {name: whole_source(tensor) for name, tensor in self.adapter.items()}, architecture=architecture
        )

    def _place(self, receiver: WeightReceiver, manifest: WeightManifest, deadline_s: float) -> None:
        """Receive A and B, and merge them; the version counts as staged only after the last weight."""
        deadline = Deadline(manifest, deadline_s)
        super()._place(receiver, manifest, deadline_s)
        for target in self._targets:
            deadline.remaining(f"merging into {target.weight}")
            self._refuse_cancelled(manifest)
            change = self.adapter[target.b].float() @ self.adapter[target.a].float()
            self.copy[target.weight].copy_(self.base[target.weight].float() + change)
