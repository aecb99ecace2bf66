"""Defines the training of a draft head, which is published with the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch

    from trainer.batch import Batch
    from trainer.storage.host_state import HostState


class DraftTraining(ABC):
    """A draft head under training, on the policy's only rank.

    It is trained between steps. A version has the head as it was at the end of its step, so a version that is
    exported again is the same.
    """

    published: Mapping[str, torch.Tensor]
    """The head of the policy's version, by the names of tensors in versions."""

    left: Sequence[int]
    """Samples of the last batch for the next updates, the last ones first."""

    @abstractmethod
    def join(self, batch: Batch) -> float | None:
        """Make the head as it is a part of the policy's new version, and learn from its step's batch next.

        Returns:
            Mean loss of the updates since the version before; None: there were none.
        """

    @abstractmethod
    def update(self) -> None:
        """Make one update with a few of the samples that are `left`, or drop them for lack of memory."""

    @abstractmethod
    def copy_parts(self) -> Mapping[str, HostState]:
        """Return directory in a checkpoint -> its contents; valid until the next call."""

    @abstractmethod
    def restore_parts(self, checkpoint: Path) -> None:
        """Load what `copy_parts` returned; a checkpoint that was made without a head leaves it as it is.

        What was `left` of a batch is dropped.

        Raises:
            SettingsError: the checkpoint has another head; names both.
        """
