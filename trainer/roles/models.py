"""Holds a rank's parts of all models of a run."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from trainer.backends.base import Backend
from trainer.backends.rank_commands import is_distributed
from trainer.roles.entropy import EntropyControl
from trainer.roles.frozen import NO_FROZEN, FrozenModels
from trainer.storage.host_state import HostState


@dataclass(frozen=True, slots=True)
class RankModels:
    """A rank's part of each model, by role.

    Every method is called on every rank in the same order (collectives inside).
    """

    policy: Backend
    """The model that generates, and is published."""
    entropy: EntropyControl | None = None
    """The entropy bonus of a recipe that has a target for it; None: the bonus is that of the settings."""
    frozen: FrozenModels = NO_FROZEN
    """Those that are never trained."""

    def copy_state(self) -> HostState:
        """Return this rank's part of a checkpoint, copied to host memory; valid until the next call."""
        state = self.policy.copy_state()
        if self.entropy is not None and not (is_distributed() and dist.get_rank()):
            state = self.entropy.added_to(state)
        return state

    def restore(self, directory: Path) -> None:
        """Load this rank's part of a checkpoint.

        Raises:
            SettingsError: as `Backend.restore`, and `EntropyControl.restore`.
        """
        if self.entropy is not None:
            self.entropy.restore(directory)
        self.policy.restore(directory)

    def keep_reference(self) -> None:
        """Keep the policy's current weights as the reference model, unless that is a model of its own."""
        if self.frozen.reference is None:
            self.policy.keep_reference()

    def offload(self) -> None:
        """Move everything on the device to the host."""
        self.policy.offload()
        for role in self.frozen.roles:
            role.offload()

    def onload(self) -> None:
        """Move what `offload` moved back to the device."""
        self.policy.onload()
        for role in self.frozen.roles:
            role.onload()

    def close(self) -> None:
        """Release the models; idempotent."""
        self.policy.close()
