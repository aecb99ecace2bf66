"""Publishes versions as files: in shared memory, in a directory that hosts share, or below a URL.

    DIRECTORY/owner.pid                          of `shm`, see `protocol/host/owned_directory.py`
    DIRECTORY/v00000012-EPOCH/bucket_00000.bin   the version, at the manifest's `location`
    DIRECTORY/v00000012-EPOCH/manifest.json      the manifest, written last

With `weights.delta` most directories have changes instead of buckets, see `deltas.py`.

Versions on disk outlive the run, so engines that join late and restarted trainers find them. Versions in
shared memory end with the trainer. They are plain files rather than `multiprocessing.shared_memory`, because
the resource tracker of a reader would unlink the latter when the reader exits.
"""

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from protocol.errors import WeightError
from protocol.host.owned_directory import OWNER, SHARED_MEMORY, claim, claim_shared
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import BucketContents, Named, drain, fill_buckets, make_manifest
from trainer.weights.deltas import DeltaWriter
from trainer.weights.version_directories import (
    VersionDirectories,
    VersionRoot,
    bucket_path,
    remove,
    write_manifest,
)

REMEDIES = {
    "disk": "free some, or lower weights.keep",
    "http": "free some, or lower weights.keep",
    "shm": "enlarge it (docker: --shm-size), lower weights.keep, or set weights.directory",
}
"""Transport -> what to do where its directory is full."""


def disk_sender(config: WeightConfig, run_dir: Path) -> "FileSender":
    """Make the directory, and take over the versions that an earlier trainer of the run published there.

    Raises:
        WeightError: the directory cannot be made or read.
    """
    return _lasting("disk", config, run_dir, lambda config, directory: VersionRoot(str(directory)))


def http_sender(config: WeightConfig, run_dir: Path) -> "FileSender":
    """As `disk_sender`, for engines that read the directory, or a copy of it, by URL.

    Raises:
        SettingsError: fsspec does not know the kind of URL.
        WeightError: the directory cannot be made, read or served.
    """
    from trainer.weights.version_roots import url_root  # imports a web server

    return _lasting("http", config, run_dir, url_root)


def _lasting(
    transport: str,
    config: WeightConfig,
    run_dir: Path,
    make_root: Callable[[WeightConfig, Path], VersionRoot],
) -> "FileSender":
    directory = Path(config.directory) if config.directory else run_dir / "weights"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return FileSender(transport, directory, config, make_root(config, directory))
    except OSError as error:
        raise WeightError(f"{directory}: {error}") from error


def shm_sender(config: WeightConfig, run: str) -> "FileSender":
    """Make the directory, and remove the directories of dead trainers of the same run.

    Raises:
        WeightError: the directory cannot be made, or another live process owns it.
    """
    try:
        directory, owner = claim(Path(config.directory)) if config.directory else claim_shared(run)
        release = partial(_release, config, directory, owner)
        sender = FileSender("shm", directory, config, VersionRoot(str(directory)), release)
        sender.versions.clear()
    except OSError as error:
        raise WeightError(f"{config.directory or SHARED_MEMORY}: {error}") from error
    return sender


def _release(config: WeightConfig, directory: Path, owner: int) -> None:
    """Give up a directory of shared memory; one that the settings name stays."""
    if config.directory:
        (directory / OWNER).unlink(missing_ok=True)
    else:
        remove(directory)
    os.close(owner)


class FileSender:
    """Copies each tensor into a mapped file and digests it there, in one pass over the bytes."""

    in_parts = False

    def __init__(
        self,
        transport: str,
        directory: Path,
        config: WeightConfig,
        root: VersionRoot,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Take over the versions in a directory.

        Args:
            transport: "disk", "http" or "shm".
            directory: an existing directory, which holds the versions.
            config: section `[weights]`.
            root: where engines find them.
            release: called by `close`, once all versions are removed. None: versions outlive the sender, and
                each is synced to the disk.

        Raises:
            OSError: the directory cannot be read.
        """
        self.directory = directory
        self._root = root
        self.versions = VersionDirectories(directory, root, config.keep, durable=release is None)
        self.versions.adopt()
        self._transport = transport
        self._bucket_bytes = config.bucket_mb << 20
        self._last_bytes = 0
        self._deltas = DeltaWriter(config, self._require_space) if config.delta else None
        """Writes the versions where the changes alone are written."""
        self._release = release

    def provisional(self, epoch: str, version: int) -> None:
        """Return None: engines wait for the manifest."""

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Named,
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        try:
            if self._deltas is None:
                self._require_space(self._last_bytes)
            with self.versions.written(epoch, version) as (aside, final):
                if self._deltas:
                    contents = self._deltas.write(tensors, version, aside, final.name)
                else:
                    contents = self._write(tensors, aside)
                location = f"{self._root.location}/{final.name}"
                manifest = make_manifest(
                    self._transport, location, epoch, version, contents, base_model=base_model, tied=tied
                )
                if self._deltas:
                    manifest = self._deltas.completed(manifest, aside)
                write_manifest(manifest, aside)
        except OSError as error:
            drain(tensors)
            raise WeightError(f"version {version} in {self.directory}: {error}") from error
        except WeightError:
            drain(tensors)
            raise
        self._last_bytes = sum(contents.buckets)
        self.versions.require(manifest)
        if self._deltas:
            self._deltas.published(manifest)
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

    def _write(self, tensors: Named, aside: Path) -> BucketContents:
        """Write all bytes of a version. Raises OSError or WeightError."""

        def reserve(index: int, offset: int, nbytes: int) -> None:
            self._reserve(bucket_path(aside, index), offset, nbytes)

        contents = fill_buckets(
            tensors, self._bucket_bytes, lambda i, size: _map(bucket_path(aside, i), size), reserve
        )
        for index, nbytes in enumerate(contents.buckets):
            os.truncate(bucket_path(aside, index), nbytes)
        return contents

    def _reserve(self, bucket: Path, offset: int, nbytes: int) -> None:
        """Allocate pages before they are written: writing to one that cannot be allocated raises SIGBUS."""
        self._require_space(nbytes)
        with bucket.open("rb+") as file:
            os.posix_fallocate(file.fileno(), offset, nbytes)

    def _require_space(self, needed: int) -> None:
        found = os.statvfs(self.directory)
        free = found.f_bavail * found.f_frsize
        if free < needed:
            raise WeightError(
                f"{self.directory} has {free >> 20} MiB free, the weights need {needed >> 20} MiB more: "
                + REMEDIES[self._transport]
            )


def _map(bucket: Path, size: int) -> torch.Tensor:
    """Create a sparse file of `size` bytes and return it as a uint8 tensor."""
    with bucket.open("xb+") as file:
        os.truncate(file.fileno(), size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
