"""Defines the training of a draft head, which is published with the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that read settings import the registry, which must not import torch
    import torch

    from trainer.batch import Batch
    from trainer.storage.host_state import HostState


class DraftTraining(ABC):
    """A draft head under training, on the policy's only rank.

    The head is trained between steps. A version contains the head at the end of its step, so exporting the
    version again gives the same tensors.
    """

    published: Mapping[str, torch.Tensor]
    """Head of the policy's current version, by tensor name in versions."""

    left: Sequence[int]
    """Samples of the last batch for the next updates, in reverse order."""

    @abstractmethod
    def join(self, batch: Batch) -> float | None:
        """Add the current head to the policy's new version, and use its batch for the next updates.

        Returns:
            Mean loss of the updates since the previous version; None without updates.
        """

    @abstractmethod
    def update(self) -> None:
        """Make one update with a few samples of `left`, or drop them if memory is insufficient."""

    @abstractmethod
    def copy_parts(self) -> Mapping[str, HostState]:
        """Return directory in a checkpoint -> its contents; valid until the next call."""

    @abstractmethod
    def restore_parts(self, checkpoint: Path) -> None:
        """Load the result of `copy_parts`; a checkpoint without a head leaves the head unchanged.

        The samples in `left` are dropped.

        Raises:
            SettingsError: the checkpoint has a different head; the message names both.
        """
