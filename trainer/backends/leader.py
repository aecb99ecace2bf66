"""Runs the model's work on all ranks, from rank 0: broadcasts the command, then does rank 0's part of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.messages import WeightDraft, WeightManifest
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, StepStats
from trainer.backends.follow import offload_and_wait
from trainer.backends.rank_commands import (
    DraftCommand,
    ExitCommand,
    ExportCommand,
    ExportModelCommand,
    FinishSaveCommand,
    IdleCommand,
    KeepReferenceCommand,
    OffloadCommand,
    OnloadCommand,
    PublishCommand,
    RestoreCommand,
    SaveCommand,
    TrainCommand,
    broadcast_command,
)
from trainer.backends.state_writer import StateWriter
from trainer.backends.step import run_step_on_all_ranks
from trainer.data.step_plan import StepPlan
from trainer.lora import as_published
from trainer.roles.models import RankModels
from trainer.storage.host_state import HostCopies
from trainer.weights.base import WeightSender
from trainer.weights.early_export import Tensors
from trainer.weights.publish import publish


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """The model of one version in host memory."""

    tensors: Mapping[str, torch.Tensor]
    """Hugging Face name -> tensor of the whole model, adapters merged."""
    adapter: Mapping[str, torch.Tensor]
    """A and B by PEFT's names, not scaled; empty without adapters."""


class LeaderRank:
    """Rank 0 of the model. Every method blocks; call all of them in one thread."""

    def __init__(self, models: RankModels, algorithm: Algorithm) -> None:
        self._models = models
        self._algorithm = algorithm
        self._writer = StateWriter()
        self._copies, self._adapter_copies = HostCopies(), HostCopies()

    @property
    def backend(self) -> Backend:
        """Rank 0's part of the policy."""
        return self._models.policy

    def train(
        self, command: TrainCommand, begin: Callable[[Tensors], None] | None = None
    ) -> tuple[StepPlan, StepStats]:
        """Make one optimizer step; returns its plan and what it measured.

        Args:
            command: that of the step.
            begin: may be called with the tensors of the new version, as `Backend.export_ahead` says; None: it
                is exported after the step.
        """
        return run_step_on_all_ranks(self._models, self._algorithm, command, begin)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to publish, adapters scaled. Must be exhausted before the next call."""
        broadcast_command(ExportCommand())
        return as_published(self.backend.export(), self.backend.targets, self.backend.lora)

    def provisional(self, sender: WeightSender, epoch: str, version: int) -> WeightDraft | None:
        """Accept requests for a version that `publish` will make, on every rank that publishes a part."""
        if sender.in_parts:
            broadcast_command(DraftCommand(epoch, version))
        return sender.provisional(epoch, version)

    def publish(self, sender: WeightSender, epoch: str, version: int, dtype: str) -> WeightManifest:
        """Publish the weights in a dtype; complete when it returns.

        Raises:
            WeightError: no rank serves the version.
        """
        broadcast_command(PublishCommand(epoch, version, dtype))
        return publish(self.backend, sender, epoch, version, dtype)

    def begin_save(self, directory: Path) -> None:
        """Copy every rank's part of a checkpoint to the host, and begin to write it to an existing directory.

        On return the model may change. `finish_save` follows, before the next part is begun.
        """
        broadcast_command(SaveCommand(str(directory)))
        self._writer.begin(self._models.copy_state(), directory)

    def await_part(self) -> None:
        """Wait until rank 0's part is written, or has failed; may be called in any thread."""
        self._writer.wait()

    def finish_save(self) -> None:
        """Wait until every rank's part is on disk. With one rank, it may be called in any thread.

        Raises:
            TetherError: a rank could not write its part.
        """
        broadcast_command(FinishSaveCommand())
        self._writer.finish()

    def restore(self, directory: Path) -> None:
        """Load a checkpoint."""
        broadcast_command(RestoreCommand(str(directory)))
        self._models.restore(directory)

    def copy_model(self) -> ModelCopy:
        """Return the whole model and its adapters, copied to host memory; valid until the next call."""
        broadcast_command(ExportModelCommand())
        model = self._copies.copy_all(self.backend.export_model())
        adapter: dict[str, torch.Tensor] = {}
        if self.backend.targets:
            broadcast_command(ExportCommand())
            adapter = self._adapter_copies.copy_all(self.backend.export())
        return ModelCopy(model, adapter)

    def keep_reference(self) -> None:
        """Keep the current weights as the reference model."""
        broadcast_command(KeepReferenceCommand())
        self._models.keep_reference()

    def onload(self) -> None:
        """Move what `offload` moved back to the devices."""
        broadcast_command(OnloadCommand())
        self._models.onload()

    def offload(self) -> None:
        """Move everything on the devices to the host; returns when every rank has."""
        broadcast_command(OffloadCommand())
        offload_and_wait(self._models)

    def idle(self) -> None:
        """Let the other ranks know that rank 0 lives, so that their wait is bounded."""
        broadcast_command(IdleCommand())

    def exit(self) -> None:
        """End the other ranks."""
        broadcast_command(ExitCommand())

    def close(self) -> None:
        """Release the model, when what is being written of it is written; idempotent."""
        self._writer.close()
        self._models.close()
