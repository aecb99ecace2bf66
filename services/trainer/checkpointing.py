"""Writes checkpoints and exports during training, and prunes the records that they cover.

A step waits until the state of every rank and the exported model are copied to host memory. Threads write the
copies and finish with the manifest. One checkpoint is written at a time; a step whose checkpoint is due waits
for the previous one. Spool and ledger forget records only once a complete checkpoint covers them.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from protocol.errors import TetherError
from protocol.host.full_disk import is_disk_full_error
from services.ledger.interface import LedgerStatus, StepRecord
from services.runtime.writing import RETRY_S, waiting_for_room
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import OpenRun
from services.trainer.uploads import FINISH_S, Destination, HubModel, RemoteRun, Uploader
from trainer.execution.commands import ExportCommand, SaveCommand
from trainer.lora import save_adapter
from trainer.storage.call_store import CallStore
from trainer.storage.checkpoints import NAME
from trainer.storage.hf_export import finish_hf, shards_of
from trainer.storage.remote import RemoteDirectory
from trainer.storage.stored import MissingRecords

log = logging.getLogger("tether.trainer")


class Checkpointer:
    """Context manager that writes the checkpoints of a run; on exit the last checkpoint is complete.

    If the block raises, an unfinished checkpoint stays incomplete and readers skip it.
    """

    def __init__(self, run: OpenRun, runner: ModelRunner) -> None:
        self._run = run
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._tasks = asyncio.TaskGroup()
        self._writing: asyncio.Task[None] | None = None
        self._failure: TetherError | None = None
        self._no_room_error: TetherError | None = None
        """Why there was no room for the last checkpoint or export; None if there was room."""
        settings = run.process.settings
        destinations: list[tuple[Destination, set[int]]] = []
        if settings.run.remote:
            remote = RemoteDirectory(settings.run.remote)
            keep = settings.trainer.keep_checkpoints
            destinations.append((RemoteRun(remote, settings.run_dir, keep), run.checkpoints.held))
        if settings.run.hub:
            destinations.append((HubModel(settings.run.hub, settings.run.name), set()))
        metrics = run.process.metrics
        self._uploaders = [
            Uploader(destination, settings.run_dir, retained, metrics)
            for destination, retained in destinations
        ]

    async def __aenter__(self) -> "Checkpointer":
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.finish()
        finally:
            if self._writing is not None:
                self._writing.cancel()
            end = time.monotonic() + FINISH_S
            for uploader in self._uploaders:
                if error is None:
                    with self._run.process.working("copies the last checkpoint"):
                        await asyncio.to_thread(uploader.finish, end - time.monotonic())
                uploader.close()
            await asyncio.to_thread(self._thread.shutdown)
            await self._tasks.__aexit__(kind, error, trace)

    async def checkpoint(self, status: LedgerStatus, digest: int) -> None:
        """Start a checkpoint and an export; once written, spool and ledger forget the records they cover.

        Returns when the model may change. After a failed write no record is forgotten: `check` raises the
        error, or `is_retry_due` is true if there was no room. Such a retry is complete on return,
        unless the process is to stop.

        Args:
            status: ledger status at the model's version.
            digest: digest in the version's weight manifest.

        Raises:
            TetherError: this checkpoint cannot be started, or the last one could not be written.
        """

        async def start_writing() -> None:
            complete = await self._begin(status.version, digest, status.sequence)
            shards = shards_of(self._export_dir(status.version))
            await self._in_thread(_remove_shards, shards.parent)
            if complete is not None:  # an existing export of this version has other weights
                await self._in_thread(_remove_export, self._export_dir(status.version))
            adapter = await self._runner.lead(ExportCommand(str(shards)))
            self._write_in_background(self._write_all, status.version, complete, adapter)

        await self.finish()
        if self._no_room_error is None:
            await self._attempt(start_writing)
        else:
            await self._retry_for_room(start_writing)

    async def save(self, version: int, digest: int, sequence: int) -> None:
        """Write a checkpoint without an export; return when the checkpoint is complete.

        Args:
            version: number of committed steps in the weights.
            digest: digest in the version's weight manifest.
            sequence: sequence number of the ledger.

        Raises:
            TetherError: the checkpoint cannot be written.
        """

        async def start_writing() -> None:
            complete = await self._begin(version, digest, sequence)
            self._write_in_background(self._write_parts, version, complete)

        await self._attempt(start_writing)
        await self.finish()
        await self._retry_for_room(start_writing)

    async def resume_copies(self, version: int) -> None:
        """Copy a complete checkpoint to all destinations that have no copy by an earlier trainer."""
        for uploader in self._uploaders:
            await self._in_thread(uploader.resume, version, self._run.spool, self._export_dir(version))

    async def remove_exports_after(self, version: int) -> None:
        """Remove exports of versions after `version`, which a rewound run has abandoned."""
        for export in self._export_dir(version).parent.glob("step_*"):
            found = NAME.fullmatch(export.name)
            if found and int(found[1]) > version:
                await self._in_thread(_remove_export, export)

    async def finish(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            TetherError: the last checkpoint or export could not be written.
        """
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        self.check()

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each checkpoint whose copy failed since the last call."""
        return tuple(warning for uploader in self._uploaders for warning in uploader.warnings())

    def check(self) -> None:
        """Raise TetherError if the last checkpoint or export could not be written."""
        if self._failure is not None:
            raise self._failure

    async def is_saved(self, version: int, digest: int) -> bool:
        """Wait for writes in progress; return whether a complete checkpoint has this version and digest."""
        await self.finish()
        complete = await asyncio.to_thread(self._run.checkpoints.complete)
        return any((c.version, c.manifest.digest) == (version, digest) for c in complete)

    @property
    def is_retry_due(self) -> bool:
        """Whether the last checkpoint or export failed for lack of room, so that another one is due."""
        return self._no_room_error is not None

    def _store_error(self, error: TetherError) -> None:
        """Store why a checkpoint could not be written."""
        if is_disk_full_error(error):
            log.error("checkpoint.no_room error=%s", error)
            self._no_room_error = error
        else:
            self._failure = error

    async def _attempt(self, start_writing: Callable[[], Awaitable[None]]) -> None:
        try:
            await start_writing()
        except TetherError as error:
            self._store_error(error)
            self.check()

    async def _retry_for_room(self, start_writing: Callable[[], Awaitable[None]]) -> None:
        """Write a checkpoint that failed for lack of room; retry until it fits or the process is to stop."""
        if self._no_room_error is None:
            return
        async with waiting_for_room(self._run.process, self._no_room_error):
            while self._no_room_error is not None and not await self._run.process.stopped_within(RETRY_S):
                await self._run.check_ownership()
                self._no_room_error = None
                await self._attempt(start_writing)
                await self.finish()

    async def _begin(self, version: int, digest: int, sequence: int) -> Callable[[], None] | None:
        """Copy every rank's state and start to write it; return a function that completes the checkpoint.

        Returns None for a version that has a complete checkpoint, since beginning again would remove it.
        """
        if await self.is_saved(version, digest):
            return None
        checkpoints = self._run.checkpoints
        directory = await self._in_thread(checkpoints.begin, version)
        position = await self._in_thread(lambda: self._run.spool.position)
        await self._runner.lead(SaveCommand(str(directory)))
        return partial(
            checkpoints.finish,
            version,
            epoch=self._run.epoch,
            digest=digest,
            sequence=sequence,
            spool_position=position,
        )

    def _write_in_background(self, write: Callable[..., Any], version: int, *args: Any) -> None:
        """Run `write` in a task; store its failure for `check`."""

        async def run() -> None:
            try:
                with self._run.process.working(f"writes the checkpoint of version {version}"):
                    await write(version, *args)
            except TetherError as error:
                self._store_error(error)

        self._writing = self._tasks.create_task(run(), name="checkpoint")

    async def _write_parts(self, version: int, complete: Callable[[], None] | None) -> str:
        """Wait until all ranks have written their parts, then complete the checkpoint unless it is complete.

        Returns:
            Why the export's parts are incomplete; empty if there is no export or its parts are complete.
        """
        try:
            export_failure = await self._runner.finish_save()
            if complete is not None:
                await self._in_thread(complete)
        except TetherError:
            if complete is not None:
                await self._in_thread(self._run.checkpoints.abandon, version)
            raise
        return export_failure

    async def _write_all(
        self, version: int, complete: Callable[[], None] | None, adapter: Mapping[str, torch.Tensor]
    ) -> None:
        """Write a checkpoint and its export, then forget the records that the checkpoint covers.

        Raises:
            TetherError: checkpoint or export is incomplete. The checkpoint is usable without the export.
        """
        began = time.monotonic()
        failure = await self._write_parts(version, complete)
        if not failure:
            failure = await self._in_thread(self._finish_export, version, adapter)
        for uploader in self._uploaders:
            await self._in_thread(uploader.put, version, self._run.spool, self._export_dir(version))
        if await self._forget():
            seconds = time.monotonic() - began
            self._run.process.metrics.seconds.labels("checkpoint").observe(seconds)
            log.info("checkpoint.done version=%d seconds=%.2f", version, seconds)
        if failure:
            raise TetherError(failure)

    async def _forget(self) -> bool:
        """Archive and forget the records that all kept checkpoints cover; return False on failure.

        The ledger forgets last, so the next checkpoint retries the records that the ledger still lists.
        """
        ledger = self._run.process.ledger
        oldest = self._run.checkpoints.complete()[0].manifest  # a trainer may restart from any of them
        covered = [record for record in await ledger.step_records(0) if record.step < oldest.version]
        try:
            await self._in_thread(self._archive, covered)
        except (TetherError, OSError) as error:
            log.error("archive.failed error=%s", error)
            return False
        groups = [group.group for record in covered for group in record.groups]
        if not await self._run.forget(groups, oldest.spool_position):
            return False
        await ledger.checkpointed(oldest.version)
        return True

    def _archive(self, covered: Sequence[StepRecord]) -> None:
        """Copy step records to the archive and sync the step reports, before spool and ledger forget them."""
        self._run.steps.sync()
        for record in covered:
            keys = [(group.group, group.token) for group in record.groups]
            try:
                records = self._run.spool.stored(keys)
            except MissingRecords as missing:  # damaged, or forgotten by an earlier trainer
                log.warning("archive.missing step=%d error=%s", record.step, missing)
                continue
            calls = CallStore(self._run.spool).group_calls([group.group for group in record.groups])
            self._run.archive.put(record.step, records, calls)
        self._run.archive.make_room()

    def _export_dir(self, version: int) -> Path:
        """Return the directory of a version's exported model, which users and `tether eval` read."""
        return self._run.process.settings.run_dir / "exports" / f"step_{version:08}"

    def _finish_export(self, version: int, adapter: Mapping[str, torch.Tensor]) -> str:
        """Complete the export that the ranks have written; keep as many exports as checkpoints.

        Returns:
            Why the export could not be completed; empty on success.
        """
        settings, target = self._run.process.settings, self._export_dir(version)
        try:
            finish_hf(target, settings.model_dir)
            if adapter:
                save_adapter(adapter.items(), _adapter(target), settings.lora, settings.model_dir)
        except Exception as error:  # safetensors raises exceptions of its own
            return f"export {target}: {error}"
        for old in sorted(target.parent.glob("step_*"))[: -settings.trainer.keep_checkpoints]:
            _remove_export(old)
        return ""

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _remove_shards(exports: Path) -> None:
    """Remove the shards of failed exports."""
    for leftover in exports.glob(shards_of(Path("step_*")).name):
        shutil.rmtree(leftover, ignore_errors=True)


def _remove_export(export: Path) -> None:
    for stale in (export, _adapter(export)):
        shutil.rmtree(stale, ignore_errors=True)


def _adapter(export: Path) -> Path:
    """Return the directory of an export's adapter."""
    return export.with_name(f"adapter_{export.name}")
