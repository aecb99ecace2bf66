"""Rank 0 of the trainer: the model's parts on all ranks behind one handle, and everything a step needs beside
it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from protocol.device.shared_layout import BUFFERS, PARAMETERS, TRANSPORT
from protocol.device.shared_tensors import map_tensors
from protocol.messages import WeightDraft, WeightManifest
from services.bus.broadcast import Broadcaster
from services.ledger.interface import Taken
from services.runtime.process import Process
from services.settings.sections import Settings
from services.trainer.gpu_turn import TrainerGpuTurn
from services.trainer.shared_engine import SharedEngine
from trainer.algorithms.base import Algorithm
from trainer.algorithms.registry import make_algorithm
from trainer.backends.base import Backend, StepStats
from trainer.backends.hf_export import save_hf
from trainer.backends.rank_commands import (
    ExportCommand,
    ExportHfCommand,
    KeepReferenceCommand,
    OffloadCommand,
    OnloadCommand,
    RestoreCommand,
    SaveCommand,
    TrainCommand,
    broadcast_command,
    leave_device,
    run_step_on_all_ranks,
    save_part,
)
from trainer.data.batch_builder import BuiltBatch
from trainer.lora import as_published, save_adapter
from trainer.registry import make_backend
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.spool import Spool
from trainer.weights.base import StreamingSender, WeightSender
from trainer.weights.bucket_writer import in_dtype

T = TypeVar("T")


@dataclass
class LeaderRank:
    """What rank 0 holds, and what it does together with the other ranks (methods marked: compute thread)."""

    process: Process
    backend: Backend
    algorithm: Algorithm
    spool: Spool
    archive: Archive
    sender: WeightSender
    checkpoints: Checkpoints
    caster: Broadcaster
    epoch: str
    compute: ThreadPoolExecutor
    """One thread: torch work never blocks the loop, and never runs twice at once."""
    turn: TrainerGpuTurn | None = None
    """In a colocated run: when the device is the trainer's."""
    sharing: SharedEngine | None = None
    """With transport `shared`: whose weights the backend computes with."""

    async def on_compute(self, function: Callable[..., T], *args: Any) -> T:
        """Run blocking work in the one compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self.compute, function, *args)

    async def take_device(self) -> None:
        """In a colocated run: have the engines sleep, then bring the trainer's state back. Nothing happens if
        it is there.

        Raises:
            TetherError: they do not sleep, or there is no room.
        """
        if self.turn is not None and not self.turn.mine:
            await self.turn.acquire()
            await self.on_compute(self._onload)

    async def leave_device(self) -> None:
        """The inverse: only when nothing of the trainer is on the device any more may the engines wake."""
        if self.turn is not None and self.turn.mine:
            await self.on_compute(self._offload)
            await self.turn.release()

    async def engine_ready(self, manifest: WeightManifest) -> bool:
        """With transport `shared`: wait until the engine serves what was published last; false if the process
        is to stop instead.

        Raises:
            TetherError: it has gone, or does not.
        """
        return self.sharing is None or await self.sharing.ready(
            manifest, lambda path: self.on_compute(self._attach, path)
        )

    def command_for(self, taken: Taken, *, mask_late: bool = True) -> TrainCommand:
        """The command that trains on a batch; reads its records from the spool.

        Raises:
            LookupError: if the spool does not hold a group.
        """
        records = self.spool.get_many([(group.group, group.token) for group in taken.groups])
        return train_command(self.process.settings, taken, records, mask_late=mask_late)

    def train(self, command: TrainCommand) -> tuple[BuiltBatch, StepStats]:
        """One optimizer step on every rank (compute thread). Raises TetherError if the weights it was made
        with have gone meanwhile."""
        self._withdraw()
        done = run_step_on_all_ranks(self.backend, self.algorithm, command)
        if self.sharing is not None:
            self.sharing.check()
        return done

    def provisional(self, version: int) -> WeightDraft | None:
        """Have engines receive a version while `publish` makes it, if the transport can do that (compute
        thread)."""
        return (
            self.sender.provisional(self.epoch, version) if isinstance(self.sender, StreamingSender) else None
        )

    def publish(self, version: int) -> WeightManifest:
        """Export on every rank and make the version available (compute thread)."""
        broadcast_command(ExportCommand())
        trained = as_published(self.backend.export(), self.backend.targets, self.backend.lora)
        tensors = in_dtype(trained, self.process.settings.engine.dtype)
        return self.sender.publish(self.epoch, version, tensors, base_model=self.backend.architecture)

    def save(self, version: int, digest: int, sequence: int) -> None:
        """Write a checkpoint on every rank; its manifest comes last (compute thread)."""
        with self.checkpoints.writing(
            version, epoch=self.epoch, digest=digest, sequence=sequence, spool_position=self.spool.position
        ) as directory:
            broadcast_command(SaveCommand(str(directory)))
            save_part(self.backend, directory)

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory, and an adapter beside it as PEFT does (compute
        thread)."""
        source = self.process.settings.model_dir
        broadcast_command(ExportHfCommand(str(directory), str(source)))
        save_hf(self.backend, directory, source=source)
        if self.backend.targets:
            broadcast_command(ExportCommand())
            adapter = directory.with_name(f"adapter_{directory.name}")
            save_adapter(self.backend.export(), adapter, self.backend.lora, source)

    def restore(self, directory: Path) -> None:
        """Go back to a checkpoint on every rank (compute thread)."""
        self._withdraw()
        broadcast_command(RestoreCommand(str(directory)))
        self.backend.restore(directory)

    def _attach(self, path: Path) -> None:
        found = map_tensors(path)
        self.backend.attach(found.get(PARAMETERS, {}), found.get(BUFFERS, {}))

    def _withdraw(self) -> None:
        if self.sharing is not None:
            self.sharing.invalidate()

    def _onload(self) -> None:
        broadcast_command(OnloadCommand())
        self.backend.onload()

    def _offload(self) -> None:
        broadcast_command(OffloadCommand())
        leave_device(self.backend)

    def keep_reference(self) -> None:
        """Keep the reference model on every rank (compute thread)."""
        broadcast_command(KeepReferenceCommand())
        self.backend.keep_reference()


def train_command(
    settings: Settings, taken: Taken, records: Sequence[bytes], *, mask_late: bool = True
) -> TrainCommand:
    """The command that trains on a batch whose records, in the order of its groups, are at hand."""
    return TrainCommand(
        step=taken.step,
        records=list(records),
        bounds=[group.max_staleness for group in taken.groups],
        mask_late=mask_late,
        temperature=settings.sampling.temperature or 1.0,
        recompute_logprobs=settings.trainer.recompute_logprobs,
        reference_logprobs=settings.algorithm.kl_coef > 0,
    )


def build_backend(settings: Settings) -> Backend:
    """This rank's part of the model."""
    return make_backend(
        settings.model_dir,
        parallel=settings.parallel,
        optimizer=settings.optimizer,
        trainer=settings.trainer,
        algorithm=make_algorithm(settings.algorithm),
        adapters=settings.lora,
        shared=settings.weights.transport == TRANSPORT,
    )
