"""Publishes versions as files: in shared memory, in a directory shared by hosts, or below a URL.

    DIRECTORY/owner.pid                          of `shm`, see `protocol/host/owned_directory.py`
    DIRECTORY/v00000012-EPOCH/bucket_00000.bin   the version, at the manifest's `location`
    DIRECTORY/v00000012-EPOCH/manifest.json      the manifest, written last

With `weights.delta`, most directories contain changes instead of buckets, see `deltas.py`. If the trainer has
several hosts, each rank has a file of its own in every version; the files of an anchor contain all bytes.

Versions on disk outlive the run, so late engines and restarted trainers find them. Versions in shared memory
end with the trainer. They are plain files instead of `multiprocessing.shared_memory`, whose resource tracker
would unlink the memory when a reader exits.
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from protocol.errors import WeightError
from protocol.host.owned_directory import OWNER, SHARED_MEMORY, claim, claim_shared
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import Named, drain, make_manifest
from trainer.weights.version_directories import (
    VersionDirectories,
    VersionRoot,
    remove,
    versions_in,
    write_manifest,
)
from trainer.weights.version_writer import PartWriter, VersionWriter

REMEDIES = {
    "disk": "free some, or lower weights.keep",
    "http": "free some, or lower weights.keep",
    "shm": "enlarge it (docker: --shm-size), lower weights.keep, or set weights.directory",
}
"""Transport -> remedy for a full directory."""


def disk_sender(
    config: WeightConfig, run_dir: Path, blank: WeightManifest | None = None, *, per_rank_files: bool = False
) -> "FileSender":
    """Create the directory, and adopt versions that an earlier trainer of the run published there.

    Args:
        blank: as in `FileSender`.
        per_rank_files: as in `FileSender`.

    Raises:
        WeightError: the directory cannot be created or read.
    """

    def root(_: WeightConfig, directory: Path) -> VersionRoot:
        return VersionRoot(str(directory))

    return _directory_sender("disk", config, run_dir, blank, root, per_rank_files=per_rank_files)


def http_sender(
    config: WeightConfig, run_dir: Path, blank: WeightManifest | None = None, *, per_rank_files: bool = False
) -> "FileSender":
    """Return a sender as `disk_sender`, for engines that read the directory, or a copy of it, by URL.

    Raises:
        SettingsError: fsspec does not support the URL.
        WeightError: the directory cannot be created, read or served.
    """
    from trainer.weights.version_roots import url_root  # the module imports a web server

    return _directory_sender("http", config, run_dir, blank, url_root, per_rank_files=per_rank_files)


def _directory_sender(
    transport: str,
    config: WeightConfig,
    run_dir: Path,
    blank: WeightManifest | None,
    make_root: Callable[[WeightConfig, Path], VersionRoot],
    *,
    per_rank_files: bool,
) -> "FileSender":
    directory = versions_in(config, run_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        root = make_root(config, directory)
        try:
            return FileSender(transport, directory, config, root, blank, per_rank_files=per_rank_files)
        except BaseException:
            root.close()
            raise
    except OSError as error:
        raise WeightError(f"{directory}: {error}") from error


def shm_sender(
    config: WeightConfig, run: str, blank: WeightManifest | None = None, run_dir: Path | None = None
) -> "FileSender":
    """Create the directory, and remove directories of dead trainers of the same run.

    `run_dir` tells runs of the same name apart.

    Raises:
        WeightError: the directory cannot be created, or another live process owns it.
    """
    try:
        directory, owner = claim(Path(config.directory)) if config.directory else claim_shared(run, run_dir)
        release = partial(_release, config, directory, owner)
        sender = FileSender("shm", directory, config, VersionRoot(str(directory)), blank, release)
        sender.versions.clear()
    except OSError as error:
        raise WeightError(f"{config.directory or SHARED_MEMORY}: {error}") from error
    return sender


def _release(config: WeightConfig, directory: Path, owner: int) -> None:
    """Release a directory in shared memory, and delete it unless the settings name it."""
    if config.directory:
        (directory / OWNER).unlink(missing_ok=True)
    else:
        remove(directory)
    os.close(owner)


class FileSender(WeightSender):
    """Sender of rank 0, which writes versions to directories, alone or together with the other ranks."""

    def __init__(
        self,
        transport: str,
        directory: Path,
        config: WeightConfig,
        root: VersionRoot,
        blank: WeightManifest | None,
        release: Callable[[], None] | None = None,
        *,
        per_rank_files: bool = False,
    ) -> None:
        """Adopt the versions in a directory.

        Args:
            transport: "disk", "http" or "shm".
            directory: existing directory of the versions.
            root: location where engines read the versions.
            blank: `blank_manifest`, if all ranks write or `weights.delta` is set; None: rank 0 writes all
                bytes.
            release: called by `close` after all versions are removed. None: versions outlive the sender, and
                each is synced to disk.
            per_rank_files: whether the ranks are on several hosts, so each rank writes to files of its own.

        Raises:
            OSError: the directory cannot be read.
        """
        self.directory = directory
        self.in_parts = blank is not None and len(blank.parts) > 1
        self._root = root
        self.versions = VersionDirectories(directory, root, config.keep, durable=release is None)
        self.versions.adopt()
        self._transport = transport
        self._release = release
        assert blank is not None or not config.delta
        self._writer = VersionWriter(config, self._require_space)
        if blank is not None:
            self._writer = PartWriter(config, self._require_space, blank, per_rank_files=per_rank_files)

    def publish(self, epoch: str, version: int, tensors: Named, *, base_model: str = "") -> WeightManifest:
        try:
            with self.versions.written(epoch, version) as (aside, final):
                contents = self._writer.write(tensors, version, aside, final.name)
                location = f"{self._root.location}/{final.name}"
                manifest = make_manifest(
                    self._transport, location, epoch, version, contents, base_model=base_model
                )
                manifest = self._writer.completed(manifest, aside)
                write_manifest(manifest, aside)
        except (OSError, WeightError) as error:
            self._writer.failed()
            drain(tensors)
            if isinstance(error, WeightError):
                raise
            raise WeightError(f"version {version} in {self.directory}: {error}") from error
        self.versions.require(manifest)
        self._writer.published(manifest)
        return manifest

    def retire(self, in_use: frozenset[int]) -> None:
        self.versions.retire(in_use)

    def close(self) -> None:
        """Remove all versions that do not outlive the run; idempotent."""
        self._root.close()
        release, self._release = self._release, None
        if release is not None:
            self.versions.clear()
            release()

    def _require_space(self, needed: int) -> None:
        found = os.statvfs(self.directory)
        free = found.f_bavail * found.f_frsize
        if free < needed:
            raise WeightError(
                f"{self.directory} has {free >> 20} MiB free, the weights need {-(-needed >> 20)} MiB more: "
                + REMEDIES[self._transport]
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
