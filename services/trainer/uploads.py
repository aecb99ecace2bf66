"""Copies checkpoints and exports to `run.remote`, and exports to `run.hub`, during the steps.

Of each destination one copy is made at a time and one waits; if another version is complete before, the one
that waits gives way to it. A copy that fails is tried again a few times and then left out: the run continues,
and the next report warns.
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
from protocol.host.full_disk import is_for_want_of_room
from protocol.host.hub import upload_model
from services.observability.metrics import Metrics
from services.runtime.run_copies import (
    CHECKPOINT,
    COPIES,
    RUN,
    RUN_FILES,
    CopyState,
    copy_lines,
    note_copy,
    noted_copy,
)
from services.settings.load import SPOOL
from services.settings.resume import EARLIER
from trainer.storage.remote import EXPORTS, DamagedCopy, RemoteDirectory, RemoteError
from trainer.storage.spool import Spool

log = logging.getLogger("tether.trainer")

TRIES = 4
"""Attempts of one copy."""
PAUSE_S = 1.0
"""Seconds before the second attempt; twice as many before each one after it."""
QUEUED = "not copied yet"
"""Problem of a copy that waits or is being made, as a start reads it after a trainer that was killed."""
LATE_S = 3600.0
"""Seconds after which a copy that is still being made is reported as failed: its client may wait forever."""
FINISH_S = 600.0
"""Seconds for which the end of a run waits for copies."""


@dataclass(frozen=True, slots=True)
class Job:
    """One version to copy."""

    version: int
    files: Mapping[str, Path]
    """Path in the copy -> local file."""
    staged: Path
    """Directory with temporary copies among the files, removed afterwards."""
    export: Path


class Destination(Protocol):
    """A place that versions are copied to."""

    name: ClassVar[str]
    """First word of its events, and of its directory in `COPIES`."""
    needs_export: ClassVar[bool]
    """Whether a version without an export is left out."""

    @property
    def place(self) -> str:
        """URL or name, as the user gave it."""
        ...

    def stage(self, stage: Path, version: int, spool: Spool, export: Path) -> Mapping[str, Path]:
        """Return path in the copy -> local file, with what changes or may be removed kept in `stage`.

        Raises:
            TetherError, OSError: it cannot be kept.
        """
        ...

    def copy(self, job: Job) -> None:
        """Copy a version.

        Raises:
            TetherError: it is not there; another attempt may help.
        """
        ...


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """The directory elsewhere that the run can be resumed from."""

    name: ClassVar[str] = "remote"
    needs_export: ClassVar[bool] = False
    directory: RemoteDirectory
    """The one of `run.remote`."""
    run_dir: Path
    keep: int
    """Complete copies that are kept."""

    @property
    def place(self) -> str:
        return self.directory.url

    def stage(self, stage: Path, version: int, spool: Spool, export: Path) -> Mapping[str, Path]:
        """Copy the event log first, then the spool, whose journal has the later steps."""
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
            if is_for_want_of_room(error):
                with suppress(RemoteError):
                    self._make_room(job)
            raise
        self.directory.prune(self.keep, job.version)

    def _make_room(self, job: Job) -> None:
        """Remove the parts of a copy that failed, and the oldest copy, which goes once the new one is whole.

        The next attempt has their room. The newest whole copy stays; newer ones are damaged, and go. A copy
        of the same version, which is about to be replaced, is not counted.
        """
        self.directory.remove(f"{EXPORTS}/{job.export.name}")
        versions, keep = self.directory.versions(), max(1, self.keep - 1)
        if job.version not in versions:
            self.directory.remove(job.staged.name)
        older = [version for version in versions if version < job.version]
        if len(older) > keep:  # only then does one go, for which the others are read
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
    """A model on the Hugging Face hub; each export is a commit of it."""

    name: ClassVar[str] = "hub"
    needs_export: ClassVar[bool] = True
    model: str
    """OWNER/NAME: `run.hub`."""
    run: str
    """Name of the run, for messages of commits."""

    @property
    def place(self) -> str:
        return self.model

    def stage(self, stage: Path, version: int, spool: Spool, export: Path) -> Mapping[str, Path]:
        """Link the export's files, since the export is removed once there are newer ones."""
        files = {path.name: path for path in export.iterdir() if path.is_file()}
        for name, path in files.items():
            try:
                os.link(path, stage / name)
            except OSError:  # a file system without links
                shutil.copyfile(path, stage / name)
        return files

    def copy(self, job: Job) -> None:
        """Upload the export as one commit."""
        upload_model(job.staged, self.model, "", f"{job.export.name} of {self.run}", private=True)


class Uploader:
    """Copies in a thread of its own. `close` ends it."""

    def __init__(self, destination: Destination, run_dir: Path, held: set[int], metrics: Metrics) -> None:
        """Begin without a copy to make.

        Args:
            destination: where copies go.
            run_dir: the run's directory.
            held: versions whose checkpoints are not pruned; it gets those that wait or are being copied.
            metrics: counts copies and failures.
        """
        self._run_dir, self._staged = run_dir, run_dir / COPIES / destination.name
        shutil.rmtree(self._staged, ignore_errors=True)  # of a trainer that was killed
        self._to, self._held, self._metrics = destination, held, metrics
        self._newest = 0
        self._stages = count()
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._copying: Job | None = None
        self._late_at = math.inf
        """When the copy that is being made is to be reported, by `time.monotonic`."""
        self._ended = False
        self._told: list[str] = []
        self._noting = threading.Lock()
        # a daemon: a file system that hangs must not keep the process
        self._thread = threading.Thread(target=self._run, name=f"uploads.{destination.name}", daemon=True)
        self._thread.start()

    def resume(self, version: int, spool: Spool, export: Path) -> None:
        """Have the checkpoint that the run continues from copied, unless an earlier trainer has done so."""
        if noted_copy(self._run_dir, self._to.name) != CopyState(version, place=self._to.place):
            self.put(version, spool, export)

    def put(self, version: int, spool: Spool, export: Path) -> None:
        """Have a complete checkpoint copied, and the export of its version.

        Called before records that the checkpoint covers are forgotten. A destination of exports alone leaves
        out a version without one.
        """
        if self._to.needs_export and not export.is_dir():
            return
        # in a place of its own: a copy of the same version may be in the making
        stage = self._staged / str(next(self._stages)) / f"step_{version:08d}"
        self._newest = version
        self._note(version, QUEUED)
        try:
            stage.mkdir(parents=True)
            files = self._to.stage(stage, version, spool, export)
        except (TetherError, OSError) as error:
            self._fail(version, str(error))
            shutil.rmtree(stage.parent, ignore_errors=True)
            return
        with self._changed:
            self._held.add(version)
            late, self._waiting = self._waiting, Job(version, files, stage, export)
            if late is not None:
                self._release(late)
                self._metrics.count(f"{self._to.name}.skipped")
                log.warning(
                    "%s.skipped version=%d reason=a newer one is complete", self._to.name, late.version
                )
            self._changed.notify_all()

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each copy that failed, or is late, since the last call."""
        with self._changed:
            late = self._copying if time.monotonic() > self._late_at else None
            self._late_at = math.inf if late else self._late_at
        if late:
            self._fail(late.version, f"it has taken {LATE_S:g} s and is not done")
        with self._changed:
            told, self._told = tuple(self._told), []
        return told

    def finish(self, wait_s: float = FINISH_S) -> None:
        """Wait until all copies are made, at most `wait_s`: what others leave of `FINISH_S`."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not (self._copying or self._waiting), wait_s)
        if not idle:
            log.error("%s.abandoned seconds=%g", self._to.name, FINISH_S)
            self._note(self._newest, f"not copied in {FINISH_S:g} s")

    def close(self) -> None:
        """End the thread; a half made copy stays, which readers ignore."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._ended)
                job, self._waiting = self._waiting, None
                if self._ended or job is None:
                    return
                self._copying, self._late_at = job, time.monotonic() + LATE_S
                self._changed.notify_all()
            try:
                self._copy(job)
            finally:
                with self._changed:
                    self._release(job)
                    self._copying, self._late_at = None, math.inf
                    self._changed.notify_all()

    def _copy(self, job: Job) -> None:
        """Copy one version, trying again as often as `TRIES` says."""
        began, pause = time.monotonic(), PAUSE_S
        for attempt in range(1, TRIES + 1):
            try:
                self._to.copy(job)
            except TetherError as error:
                log.warning(
                    "%s.retry version=%d attempt=%d error=%s", self._to.name, job.version, attempt, error
                )
                if attempt == TRIES or self._ends_within(pause):
                    self._fail(job.version, str(error))
                    return
                pause *= 2
            else:
                self._metrics.count(f"{self._to.name}.copied")
                seconds = time.monotonic() - began
                log.info("%s.copied version=%d seconds=%.2f", self._to.name, job.version, seconds)
                self._note(job.version)
                return

    def _ends_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def _fail(self, version: int, text: str) -> None:
        self._metrics.count(f"{self._to.name}.failed")
        log.error("%s.failed version=%d error=%s", self._to.name, version, text)
        self._note(version, text)
        with self._changed:
            self._told.append(f"the checkpoint of version {version} was not copied: {text}")

    def _note(self, version: int, problem: str = "") -> None:
        """Write it for the end of the run and the next start, if it is of the version that was put last.

        A disk that is full has worse to say.
        """
        with self._noting, suppress(OSError):
            if version == self._newest:
                note_copy(self._run_dir, self._to.name, CopyState(version, problem, self._to.place))

    def _release(self, job: Job) -> None:
        others = (other for other in (self._waiting, self._copying) if other not in (None, job))
        if all(other.version != job.version for other in others):
            self._held.discard(job.version)
        shutil.rmtree(job.staged.parent, ignore_errors=True)
