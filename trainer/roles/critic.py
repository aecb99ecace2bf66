"""Defines the critic: a trained model that estimates the value of a state."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.backends.base import TrainableModel
from trainer.config import OptimizerConfig
from trainer.roles.config import CriticConfig

if TYPE_CHECKING:  # processes that read settings import the registry, which must not import torch
    import torch

    from trainer.batch import Batch


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """A critic with ranks of its own."""

    directory: Path
    """Hugging Face directory of the initial model."""
    policy_dir: Path
    """Directory of the policy, whose architecture checkpoints of the critic contain."""
    config: CriticConfig
    optimizer: OptimizerConfig
    """Settings of the policy's optimizer, which the critic uses except for the fields of `config`."""


class Critic(TrainableModel):
    """A critic under training, in the policy's layout, or on ranks and in a layout of its own.

    The batch of `train_step` has `values` and `returns`. The measurements cover only the critic.
    """

    config: CriticConfig

    @abstractmethod
    def values(self, batch: Batch) -> torch.Tensor:
        """Return the value of the state in which each token of a replica's part was sampled.

        The value head reads the last hidden state of the previous token. float32 [t] on the CPU, on each of
        the replica's ranks; 0 where not sampled.
        """

    def begin_updates(self, part: Batch) -> None:
        """Receive the `returns` of a replica's part, before the first update of a step."""

    def finish_save(self) -> str:
        """Wait until the critic's own ranks have written their shards of a checkpoint.

        Returns:
            Why a rank could not write; empty if all succeeded or the critic has no ranks of its own.
        """
        return ""
