"""Copies checkpoints and exports to `run.remote` during the steps, with the files to resume from them.

One is copied at a time and one waits; if another is complete before, the one that waits gives way to it. A
copy that fails is tried again a few times and then left out: the run continues, and the next report warns.
"""

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import TetherError
from services.observability.metrics import Metrics
from services.runtime.run_copies import CHECKPOINT, RUN, RUN_FILES, SPOOL, copy_lines
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.remote import RemoteDirectory, RemoteError
from trainer.storage.spool import Spool

log = logging.getLogger("tether.trainer")

STAGED = "uploads"
"""Directory of the run in which copies of what changes lie until they are elsewhere."""
TRIES = 4
"""Attempts of one copy."""
PAUSE_S = 1.0
"""Seconds before the second attempt; twice as many before each one after it."""
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


class Uploader:
    """Copies in a thread of its own. `close` ends it."""

    def __init__(
        self, url: str, run_dir: Path, checkpoints: Checkpoints, keep: int, metrics: Metrics
    ) -> None:
        """Begin without a copy to make.

        Args:
            url: `run.remote`.
            run_dir: the run's directory.
            checkpoints: the checkpoints in it; one that is being copied is not pruned.
            keep: complete copies that are kept.
            metrics: counts copies and failures.

        Raises:
            SettingsError: fsspec does not know the kind of URL.
        """
        self._remote = RemoteDirectory(url)
        shutil.rmtree(run_dir / STAGED, ignore_errors=True)  # of a trainer that was killed
        self._run_dir, self._checkpoints, self._keep, self._metrics = run_dir, checkpoints, keep, metrics
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._copying = self._ended = False
        self._told: list[str] = []
        # a daemon: a file system that hangs must not keep the process
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def put(self, version: int, spool: Spool, export: Path) -> None:
        """Have a complete checkpoint copied, and the export of its version.

        Called before records that the checkpoint covers are forgotten: the event log is copied first, then
        the spool, whose journal has the later steps.
        """
        checkpoint = self._run_dir / "checkpoints" / f"step_{version:08d}"
        stage = self._run_dir / STAGED / checkpoint.name
        files = {
            f"{CHECKPOINT}/{path.relative_to(checkpoint).as_posix()}": path
            for path in checkpoint.rglob("*")
            if path.is_file()
        }
        try:
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir(parents=True)
            for name in RUN_FILES:
                if (self._run_dir / name).exists():
                    copy_lines(self._run_dir / name, stage / name)
            spool.copy_to(stage / SPOOL)
        except (TetherError, OSError) as error:
            self._fail(version, str(error))
            shutil.rmtree(stage, ignore_errors=True)
            return
        files |= {f"{RUN}/{path.name}": path for path in stage.iterdir()}
        with self._changed:
            self._checkpoints.held.add(version)
            if (late := self._waiting) is not None:
                self._release(late)
                self._metrics.count("remote.skipped")
                log.warning("remote.skipped version=%d reason=a newer one is complete", late.version)
            self._waiting = Job(version, files, stage, export)
            self._changed.notify_all()

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each copy that failed since the last call."""
        with self._changed:
            told, self._told = tuple(self._told), []
        return told

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Wait until all copies are made, at most `timeout_s`."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not (self._copying or self._waiting), timeout_s)
        if not idle:
            log.error("remote.abandoned url=%s seconds=%g", self._remote.url, timeout_s)

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
                self._copying = True
                self._changed.notify_all()
            try:
                self._copy(job)
            finally:
                with self._changed:
                    self._release(job)
                    self._copying = False
                    self._changed.notify_all()

    def _copy(self, job: Job) -> None:
        """Copy one version, trying again as often as `TRIES` says."""
        began, pause = time.monotonic(), PAUSE_S
        for attempt in range(1, TRIES + 1):
            try:
                if job.export.is_dir():
                    self._remote.upload_export(job.export)
                self._remote.upload(job.version, job.files)
                self._remote.prune(self._keep)
            except RemoteError as error:
                log.warning("remote.retry version=%d attempt=%d error=%s", job.version, attempt, error)
                if attempt == TRIES or self._ends_within(pause):
                    self._fail(job.version, str(error))
                    return
                pause *= 2
            else:
                self._metrics.count("remote.copied")
                seconds = time.monotonic() - began
                log.info("remote.copied version=%d seconds=%.2f", job.version, seconds)
                return

    def _ends_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def _fail(self, version: int, text: str) -> None:
        self._metrics.count("remote.failed")
        log.error("remote.failed version=%d error=%s", version, text)
        with self._changed:
            self._told.append(f"the checkpoint of version {version} was not copied: {text}")

    def _release(self, job: Job) -> None:
        self._checkpoints.held.discard(job.version)
        shutil.rmtree(job.staged, ignore_errors=True)
