"""Defines the critic: a model that is trained to estimate the value of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.backends.base import StepStats
from trainer.config import OptimizerConfig
from trainer.roles.config import CriticConfig

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch

    from trainer.batch import Batch
    from trainer.storage.host_state import HostState


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """A critic that has ranks of its own."""

    directory: Path
    """Hugging Face directory of the model that it starts from."""
    policy_dir: Path
    """The policy's: a checkpoint of the critic names the policy's architecture."""
    config: CriticConfig
    optimizer: OptimizerConfig
    """Settings of the policy's optimizer; the critic's differ in the fields of `config`."""


class Critic(ABC):
    """A critic under training. Every method is called on every rank in the same order (collectives inside).

    Its layout is the policy's, or it has ranks and a layout of its own.
    """

    config: CriticConfig

    @abstractmethod
    def values(self, batch: Batch) -> torch.Tensor:
        """Return the value of the state in which each token of a replica's part was sampled.

        It is read from the model's last hidden state at the token before. float32 [t] on the CPU, on each of
        the replica's ranks; 0 where not sampled.
        """

    def begin_updates(self, part: Batch) -> None:  # noqa: B027 (a critic beside the policy has them)
        """Take notice of the `returns` of a replica's part, before the first update of a step."""

    @abstractmethod
    def train_step(self, batch: Batch) -> StepStats:
        """Make one optimizer step on a replica's part, which has `values` and `returns`.

        The measurements are of the critic alone; None: not measured.
        """

    @abstractmethod
    def copy_state(self) -> HostState:
        """Return this rank's part of a checkpoint, copied to host memory; valid until the next call."""

    def finish_save(self) -> str:
        """Wait until ranks of its own have written their parts of a checkpoint.

        Returns:
            Why one could not; empty if all are on disk, or there are no such ranks.
        """
        return ""

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load what this rank has of a checkpoint of any layout, bit for bit.

        Raises:
            SettingsError: the checkpoint is of another model; names both.
        """

    @abstractmethod
    def offload(self) -> int:
        """Move everything on the device to the host, and return the number of bytes."""

    @abstractmethod
    def onload(self) -> None:
        """Move what `offload` moved back to the device, bit for bit.

        Raises:
            TetherError: the device has no room for it; the state stays on the host.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the model; idempotent."""
