"""Copies checkpoints and exports to `run.remote` and exports to `run.hub`, concurrently with training.

Each destination runs one copy at a time and queues one. A newer version replaces the queued one. A copy that
fails is retried a few times and then skipped: the run continues, and the next report contains a warning.
"""

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import ClassVar, Protocol

from protocol.errors import TetherError
from protocol.host.full_disk import is_disk_full_error
from protocol.host.hub import upload_model
from services.observability.metrics import Metrics
from services.runtime.run_copies import (
    CHECKPOINT,
    COPIES,
    RUN,
    RUN_FILES,
    CopyState,
    copy_lines,
    read_copy_state,
    write_copy_state,
)
from services.settings.load import SPOOL
from services.settings.resume import EARLIER
from trainer.storage.remote import EXPORTS, DamagedCopy, RemoteDirectory, RemoteError
from trainer.storage.spool import Spool

log = logging.getLogger("tether.trainer")

MAX_ATTEMPTS = 4
"""Maximum number of attempts per copy."""
RETRY_PAUSE_S = 1.0
"""Seconds before the second attempt; doubles before each further attempt."""
QUEUED = "not copied yet"
"""Recorded problem of a queued or running copy; the next start reads it if the trainer is killed."""
LATE_S = 3600.0
"""Seconds after which a running copy is reported as failed, since its client may hang."""
FINISH_S = 600.0
"""Seconds for which a run waits for copies at its end."""


@dataclass(frozen=True, slots=True)
class Job:
    """A version to copy."""

    version: int
    files: Mapping[str, Path]
    """Path in the copy -> local file."""
    staged: Path
    """Directory with temporary copies of some files, removed after the copy."""
    export: Path


class Destination(Protocol):
    """A place to which versions are copied."""

    name: ClassVar[str]
    """Prefix of the destination's log events, and name of its directory in `COPIES`."""
    needs_export: ClassVar[bool]
    """Whether versions without an export are skipped."""

    @property
    def place(self) -> str:
        """URL or name, as given in the settings."""
        ...

    def stage(self, stage: Path, version: int, spool: Spool, export: Path) -> Mapping[str, Path]:
        """Return path in the copy -> local file. Files that may change or vanish are copied to `stage`.

        Raises:
            TetherError, OSError: a file cannot be copied.
        """
        ...

    def copy(self, job: Job) -> None:
        """Copy a version.

        Raises:
            TetherError: the copy failed; another attempt may succeed.
        """
        ...


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """Remote directory from which the run can be resumed."""

    name: ClassVar[str] = "remote"
    needs_export: ClassVar[bool] = False
    directory: RemoteDirectory
    """Directory at `run.remote`."""
    run_dir: Path
    keep: int
    """Number of complete copies to keep."""

    @property
    def place(self) -> str:
        return self.directory.url

    def stage(self, stage: Path, version: int, spool: Spool, export: Path) -> Mapping[str, Path]:
        """Copy the event log before the spool, so that the spool's journal covers the later steps."""
        checkpoint = self.run_dir / "checkpoints" / stage.name
        earlier = sorted(path.name for path in self.run_dir.glob(EARLIER))
        for name in (*earlier, *RUN_FILES):
            if (self.run_dir / name).exists():
                copy_lines(self.run_dir / name, stage / name)
        spool.copy_to(stage / SPOOL)
        files = {
            f"{CHECKPOINT}/{path.relative_to(checkpoint).as_posix()}": path
            for path in checkpoint.rglob("*")
            if path.is_file()
        }
        return files | {f"{RUN}/{path.name}": path for path in stage.iterdir()}

    def copy(self, job: Job) -> None:
        """Copy the export and the checkpoint, and remove old copies."""
        try:
            if job.export.is_dir():
                self.directory.upload_export(job.export)
            self.directory.upload(job.version, job.files)
        except RemoteError as error:
            if is_disk_full_error(error):
                with suppress(RemoteError):
                    self._make_room(job)
            raise
        self.directory.prune(self.keep, job.version)

    def _make_room(self, job: Job) -> None:
        """Remove the parts of a failed copy, and the oldest copies if enough complete ones remain.

        The next attempt uses the freed room. The newest complete copy stays; damaged copies newer than it are
        removed. A copy of the same version is not counted, since it is about to be replaced.
        """
        self.directory.remove(f"{EXPORTS}/{job.export.name}")
        versions, keep = self.directory.versions(), max(1, self.keep - 1)
        if job.version not in versions:
            self.directory.remove(job.staged.name)
        older = [version for version in versions if version < job.version]
        if len(older) > keep:  # reading the copies is expensive, so only if one will be removed
            damaged = list(takewhile(self._is_damaged, reversed(older)))
            if len(damaged) == len(older):
                return
            for version in damaged:
                self.directory.remove(f"step_{version:08d}")
        self.directory.prune(keep, job.version - 1)

    def _is_damaged(self, version: int) -> bool:
        try:
            self.directory.check(version)
        except DamagedCopy as error:
            log.warning("remote.damaged version=%d error=%s", version, error)
            return True
        return False


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model repository on the Hugging Face hub; each export is one commit."""

    name: ClassVar[str] = "hub"
    needs_export: ClassVar[bool] = True
    model: str
    """OWNER/NAME: `run.hub`."""
    run: str
    """Name of the run, for commit messages."""

    @property
    def place(self) -> str:
        return self.model

    def stage(self, stage: Path, version: int, spool: Spool, export: Path) -> Mapping[str, Path]:
        """Link the export's files into `stage`, since newer exports replace the export."""
        files = {path.name: path for path in export.iterdir() if path.is_file()}
        for name, path in files.items():
            try:
                os.link(path, stage / name)
            except OSError:  # the file system does not support links
                shutil.copyfile(path, stage / name)
        return files

    def copy(self, job: Job) -> None:
        """Upload the export as one commit."""
        upload_model(job.staged, self.model, "", f"{job.export.name} of {self.run}", private=True)


class Uploader:
    """Copies versions to a destination in a thread. `close` ends the thread."""

    def __init__(self, destination: Destination, run_dir: Path, retained: set[int], metrics: Metrics) -> None:
        """Start with an empty queue.

        Args:
            destination: where copies are written.
            run_dir: directory of the run.
            retained: versions whose checkpoints are not pruned; contains queued and running copies.
            metrics: counts copies and failures.
        """
        self._run_dir, self._staged = run_dir, run_dir / COPIES / destination.name
        shutil.rmtree(self._staged, ignore_errors=True)  # left by a killed trainer
        self._destination, self._retained, self._metrics = destination, retained, metrics
        self._newest = 0
        self._stages = count()
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._copying: Job | None = None
        self._late_from_s = math.inf
        """When the running copy counts as late, in the time of `time.monotonic`."""
        self._is_closed = False
        self._unreported: list[str] = []
        self._note_lock = threading.Lock()
        # daemon: a hanging file system must not block the process's exit
        self._thread = threading.Thread(target=self._run, name=f"uploads.{destination.name}", daemon=True)
        self._thread.start()

    def resume(self, version: int, spool: Spool, export: Path) -> None:
        """Queue a copy of the checkpoint that the run continues from, unless it was copied before."""
        copied = CopyState(version, place=self._destination.place)
        if read_copy_state(self._run_dir, self._destination.name) != copied:
            self.put(version, spool, export)

    def put(self, version: int, spool: Spool, export: Path) -> None:
        """Queue a copy of a complete checkpoint and its export.

        Must be called before the records that the checkpoint covers are forgotten. A destination for exports
        only skips versions without an export.
        """
        if self._destination.needs_export and not export.is_dir():
            return
        # in a place of its own: a copy of the same version may be in the making
        stage = self._staged / str(next(self._stages)) / f"step_{version:08d}"
        self._newest = version
        self._note(version, QUEUED)
        try:
            stage.mkdir(parents=True)
            files = self._destination.stage(stage, version, spool, export)
        except (TetherError, OSError) as error:
            self._fail(version, str(error))
            shutil.rmtree(stage.parent, ignore_errors=True)
            return
        with self._changed:
            self._retained.add(version)
            replaced, self._waiting = self._waiting, Job(version, files, stage, export)
            if replaced is not None:
                self._release(replaced)
                self._metrics.count(f"{self._destination.name}.skipped")
                log.warning(
                    "%s.skipped version=%d reason=a newer one is complete",
                    self._destination.name,
                    replaced.version,
                )
            self._changed.notify_all()

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each copy that failed or became late since the last call."""
        with self._changed:
            late = self._copying if time.monotonic() > self._late_from_s else None
            self._late_from_s = math.inf if late else self._late_from_s
        if late:
            self._fail(late.version, f"it has taken {LATE_S:g} s and is not done")
        with self._changed:
            unreported, self._unreported = tuple(self._unreported), []
        return unreported

    def finish(self, wait_s: float = FINISH_S) -> None:
        """Wait until all copies are complete, at most `wait_s`: the unused part of `FINISH_S`."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not (self._copying or self._waiting), wait_s)
        if not idle:
            log.error("%s.abandoned seconds=%g", self._destination.name, FINISH_S)
            self._note(self._newest, f"not copied in {FINISH_S:g} s")

    def close(self) -> None:
        """End the thread. An incomplete copy stays; readers ignore it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
                job, self._waiting = self._waiting, None
                if self._is_closed or job is None:
                    return
                self._copying, self._late_from_s = job, time.monotonic() + LATE_S
                self._changed.notify_all()
            try:
                self._copy(job)
            finally:
                with self._changed:
                    self._release(job)
                    self._copying, self._late_from_s = None, math.inf
                    self._changed.notify_all()

    def _copy(self, job: Job) -> None:
        """Copy one version, with up to `MAX_ATTEMPTS` attempts."""
        began, pause = time.monotonic(), RETRY_PAUSE_S
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self._destination.copy(job)
            except TetherError as error:
                log.warning(
                    "%s.retry version=%d attempt=%d error=%s",
                    self._destination.name,
                    job.version,
                    attempt,
                    error,
                )
                if attempt == MAX_ATTEMPTS or self._closes_within(pause):
                    self._fail(job.version, str(error))
                    return
                pause *= 2
            else:
                self._metrics.count(f"{self._destination.name}.copied")
                seconds = time.monotonic() - began
                log.info("%s.copied version=%d seconds=%.2f", self._destination.name, job.version, seconds)
                self._note(job.version)
                return

    def _closes_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, seconds)

    def _fail(self, version: int, text: str) -> None:
        self._metrics.count(f"{self._destination.name}.failed")
        log.error("%s.failed version=%d error=%s", self._destination.name, version, text)
        self._note(version, text)
        with self._changed:
            self._unreported.append(f"the checkpoint of version {version} was not copied: {text}")

    def _note(self, version: int, problem: str = "") -> None:
        """Record the state of the last queued version for the end of the run and the next start.

        Errors are ignored, because a full disk has worse consequences.
        """
        with self._note_lock, suppress(OSError):
            if version == self._newest:
                state = CopyState(version, problem, self._destination.place)
                write_copy_state(self._run_dir, self._destination.name, state)

    def _release(self, job: Job) -> None:
        others = (other for other in (self._waiting, self._copying) if other not in (None, job))
        if all(other.version != job.version for other in others):
            self._retained.discard(job.version)
        shutil.rmtree(job.staged.parent, ignore_errors=True)
