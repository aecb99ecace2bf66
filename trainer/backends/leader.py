"""Runs the model's work on all ranks, from rank 0: broadcasts the command, then does rank 0's part of it."""

from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, StepStats
from trainer.backends.hf_export import save_hf
from trainer.backends.rank_commands import (
    ExitCommand,
    ExportCommand,
    ExportHfCommand,
    IdleCommand,
    KeepReferenceCommand,
    OffloadCommand,
    OnloadCommand,
    RestoreCommand,
    SaveCommand,
    TrainCommand,
    broadcast_command,
)
from trainer.backends.step import offload_and_wait, run_step_on_all_ranks, save_and_wait
from trainer.data.step_plan import StepPlan
from trainer.lora import as_published, save_adapter


class LeaderRank:
    """Rank 0 of the model. Every method blocks; call all of them in one thread."""

    def __init__(self, backend: Backend, algorithm: Algorithm) -> None:
        self.backend = backend
        """Rank 0's part of the model."""
        self._algorithm = algorithm

    def train(self, command: TrainCommand) -> tuple[StepPlan, StepStats]:
        """Make one optimizer step; returns its plan and what it measured."""
        return run_step_on_all_ranks(self.backend, self._algorithm, command)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to publish, adapters scaled. Must be exhausted before the next call."""
        broadcast_command(ExportCommand())
        return as_published(self.backend.export(), self.backend.targets, self.backend.lora)

    def save(self, directory: Path) -> None:
        """Write every rank's part of a checkpoint into an existing directory."""
        broadcast_command(SaveCommand(str(directory)))
        save_and_wait(self.backend, directory)

    def restore(self, directory: Path) -> None:
        """Load a checkpoint."""
        broadcast_command(RestoreCommand(str(directory)))
        self.backend.restore(directory)

    def export_hf(self, directory: Path, source: Path) -> None:
        """Write the model as a Hugging Face directory, and adapters beside it as PEFT does.

        Args:
            directory: must not exist; adapters go to `adapter_` and its name.
            source: model directory that training began with.
        """
        broadcast_command(ExportHfCommand(str(directory), str(source)))
        save_hf(self.backend, directory, source=source)
        if self.backend.targets:
            broadcast_command(ExportCommand())
            adapter = directory.with_name(f"adapter_{directory.name}")
            save_adapter(self.backend.export(), adapter, self.backend.lora, source)

    def keep_reference(self) -> None:
        """Keep the current weights as the reference model."""
        broadcast_command(KeepReferenceCommand())
        self.backend.keep_reference()

    def onload(self) -> None:
        """Move what `offload` moved back to the devices."""
        broadcast_command(OnloadCommand())
        self.backend.onload()

    def offload(self) -> None:
        """Move everything on the devices to the host; returns when every rank has."""
        broadcast_command(OffloadCommand())
        offload_and_wait(self.backend)

    def idle(self) -> None:
        """Let the other ranks know that rank 0 lives, so that their wait is bounded."""
        broadcast_command(IdleCommand())

    def exit(self) -> None:
        """End the other ranks."""
        broadcast_command(ExitCommand())
