"""Defines the critic: a model that is trained to estimate the value of a state."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.backends.base import TrainableModel
from trainer.config import OptimizerConfig
from trainer.roles.config import CriticConfig

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch

    from trainer.batch import Batch


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


class Critic(TrainableModel):
    """A critic under training, in the policy's layout, or on ranks and in a layout of its own.

    A batch of `train_step` has `values` and `returns`, and the measurements are of the critic alone.
    """

    config: CriticConfig

    @abstractmethod
    def values(self, batch: Batch) -> torch.Tensor:
        """Return the value of the state in which each token of a replica's part was sampled.

        It is read from the model's last hidden state at the token before. float32 [t] on the CPU, on each of
        the replica's ranks; 0 where not sampled.
        """

    def begin_updates(self, part: Batch) -> None:
        """Take notice of the `returns` of a replica's part, before the first update of a step."""

    def finish_save(self) -> str:
        """Wait until ranks of its own have written their parts of a checkpoint.

        Returns:
            Why one could not; empty if all are on disk, or there are no such ranks.
        """
        return ""
