"""Writes snapshots of the versions to be evaluated to RUN_DIR/evaluation, off the step path.

A step waits only for a copy of the weights to host memory. A thread writes the copy in the format of
transport `disk`.
"""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from protocol.errors import WeightError
from services.run_record.evaluations import SNAPSHOTS, read_evaluations
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import OpenRun
from trainer.config import WeightConfig
from trainer.execution.commands import CopyWeightsCommand
from trainer.weights.files import disk_sender
from trainer.weights.version_directories import VERSION_NAME, remove

log = logging.getLogger("tether.trainer")

KEEP = 2
"""Number of newest snapshots kept in addition to version 0, scored or not."""


class Snapshots:
    """Context manager for the snapshots of a run on rank 0; on exit the last snapshot is on disk."""

    def __init__(self, run: OpenRun, runner: ModelRunner) -> None:
        """Store the arguments. With `eval.every` = 0 no snapshot is written."""
        self._run, self._process = run, run.process
        self._runner = runner
        self._interval = run.process.settings.eval.every
        self._run_dir = run.process.settings.run_dir
        self._directory = self._run_dir / SNAPSHOTS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._writing: asyncio.Future[None] | None = None
        self._last_version = -1
        """Version of the last snapshot; -1 before the first."""

    async def __aenter__(self) -> "Snapshots":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    async def take_over(self, version: int, digest: int, *, is_last: bool) -> None:
        """Remove snapshots of abandoned versions, and write the current version unless it is scored.

        Args:
            version: version from which the run continues.
            digest: digest in the version's manifest.
            is_last: whether the run is done.
        """
        if not self._interval:
            return
        scored = await asyncio.to_thread(lambda: {e.key[:2] for e in read_evaluations(self._run_dir)})
        is_scored = (version, f"{digest:016x}") in scored
        for path in self._directory.glob("v*"):
            found = VERSION_NAME.fullmatch(path.name)
            if found and int(found[1]) >= version + is_scored:
                await asyncio.to_thread(remove, path)
        if not is_scored:
            await self.take(version, digest, is_last=is_last)

    async def take(self, version: int, digest: int, *, is_last: bool) -> None:
        """Copy the weights if a snapshot is due; a thread writes the copy.

        A snapshot that cannot be written is skipped. So is a snapshot that is due while the previous one is
        being written, unless it is the last of the run.

        Args:
            version: version of the model.
            digest: digest in the committed version's manifest.
            is_last: whether the run makes no further version.
        """
        due = self._interval and (version % self._interval == 0 or is_last)
        if not due or version == self._last_version:
            return
        if self._writing is not None and not self._writing.done():
            if not is_last:
                self._process.metrics.count("snapshot.skipped")
                log.warning("snapshot.skipped version=%d reason=the one before is being written", version)
                return
            await self._writing
        self._last_version = version
        dtype = self._process.settings.engine.dtype
        tensors = await self._runner.lead(CopyWeightsCommand(dtype))
        self._writing = asyncio.get_running_loop().run_in_executor(
            self._thread, self._write, self._run.epoch, version, digest, tensors
        )

    def _write(self, epoch: str, version: int, digest: int, tensors: dict[str, torch.Tensor]) -> None:
        """Write a snapshot and remove older snapshots. Empties `tensors`."""
        config = WeightConfig(transport="disk", directory=str(self._directory), keep=KEEP)
        try:
            sender = disk_sender(config, self._run_dir)
            base_model = self._runner.executor.models.policy.architecture
            copy = sender.publish(epoch, version, _pop_tensors(tensors), base_model=base_model)
            if copy.digest != digest:  # the weights changed between commit and copy
                remove(self._directory / f"v{version:08d}-{epoch}")
                raise WeightError(f"version {version}: the copy differs from what was committed")
            sender.retire(frozenset({0}))
        except (WeightError, OSError) as error:
            self._process.metrics.count("snapshot.failed")
            log.error("snapshot.failed version=%d error=%s", version, error)


def _pop_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in order and remove each from the dictionary."""
    for name in list(tensors):
        yield name, tensors.pop(name)
