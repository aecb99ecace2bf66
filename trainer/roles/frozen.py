"""Holds a rank's parts of the models of a run that are never trained."""

from dataclasses import dataclass

import torch

from trainer.backends.base import Backend, FrozenModel
from trainer.backends.host_offload import HostOffload
from trainer.batch import Batch
from trainer.roles.placed import PlacedRole


class FrozenRole:
    """A frozen model, and where it is between its passes."""

    def __init__(self, model: FrozenModel, device: torch.device, *, offload: bool) -> None:
        """Take over a loaded model; with `offload` it is on the device during its passes only."""
        self._model, self._device, self._rests_on_host = model, device, offload
        self._host = HostOffload()
        if offload:
            self.offload()

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the batch's log-probabilities under this model, float32 [t] on the CPU."""
        self._host.onload(self._device)
        found = self._model.logprobs(batch)
        if self._rests_on_host:
            self.offload()
        return found

    def offload(self) -> None:
        """Move it to the host."""
        if not self._host.in_use:
            self._host.offload(self._device, self._model.tensors())

    def onload(self) -> None:
        """Move it back to the device, unless it rests on the host."""
        if not self._rests_on_host:
            self._host.onload(self._device)


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Frozen models of a run."""

    reference: FrozenRole | PlacedRole | None = None
    """None: the reference model is the one that the policy's backend keeps."""
    teacher: FrozenRole | PlacedRole | None = None

    @property
    def roles(self) -> tuple[FrozenRole | PlacedRole, ...]:
        """Those that there are."""
        return tuple(role for role in (self.reference, self.teacher) if role is not None)

    def reference_logprobs(self, policy: Backend, part: Batch) -> torch.Tensor:
        """Return a part's log-probabilities under the reference model."""
        return self.reference.logprobs(part) if self.reference else policy.reference_logprobs(part)


NO_FROZEN = FrozenModels()
