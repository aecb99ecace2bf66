"""Publishes versions as files in shared memory, for engines on the same host.

    DIRECTORY/owner.pid                          see `protocol/host/owned_directory.py`
    DIRECTORY/v00000012-EPOCH/bucket_00000.bin   `location` of the manifest is the version's directory

These are plain files rather than `multiprocessing.shared_memory`, because the resource tracker of a reader
would unlink the latter when the reader exits.
"""

import mmap
import os
from pathlib import Path

import torch

from protocol.errors import WeightError
from protocol.host.owned_directory import OWNER, SHARED_MEMORY, claim, claim_shared
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import Named, drain, fill_buckets, make_manifest
from trainer.weights.version_directories import VersionDirectories, remove


class ShmSender:
    """Copies each tensor into a mapped file and digests it there, in one pass over the bytes."""

    def __init__(self, config: WeightConfig, run: str) -> None:
        """Make the directory, and remove those of dead trainers of the same run.

        Raises:
            WeightError: the directory cannot be made, or another live process owns it.
        """
        self._bucket_bytes = config.bucket_mb << 20
        self._last_bytes = 0
        try:
            self.directory, self._owner = (
                claim(Path(config.directory)) if config.directory else claim_shared(run)
            )
            self._versions = VersionDirectories(self.directory, config.keep, durable=False)
            self._versions.adopt()
            self._versions.clear()
        except OSError as error:
            raise WeightError(f"{config.directory or SHARED_MEMORY}: {error}") from error
        self._made_here = not config.directory
        self._closed = False

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
            self._require_space(self._last_bytes)
            with self._versions.written(epoch, version) as (aside, final):

                def allocate(index: int, nbytes: int) -> torch.Tensor:
                    return _map(_bucket(aside, index), nbytes)

                def reserve(index: int, offset: int, nbytes: int) -> None:
                    self._reserve(_bucket(aside, index), offset, nbytes)

                contents = fill_buckets(tensors, self._bucket_bytes, allocate, reserve)
                for index, nbytes in enumerate(contents.buckets):
                    os.truncate(_bucket(aside, index), nbytes)
        except OSError as error:
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        except WeightError:
            drain(tensors)
            raise
        self._last_bytes = sum(contents.buckets)
        return make_manifest("shm", str(final), epoch, version, contents, base_model=base_model, tied=tied)

    def retire(self, in_use: frozenset[int]) -> None:
        self._versions.retire(in_use)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._versions.clear()
        if self._made_here:
            remove(self.directory)
        else:
            (self.directory / OWNER).unlink(missing_ok=True)
        os.close(self._owner)

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
                "enlarge it (docker: --shm-size), lower weights.keep, or set weights.directory"
            )


def _bucket(directory: Path, index: int) -> Path:
    return directory / f"bucket_{index:05d}.bin"


def _map(bucket: Path, size: int) -> torch.Tensor:
    """Create a sparse file of `size` bytes and return it as a uint8 tensor."""
    with bucket.open("xb+") as file:
        os.truncate(file.fileno(), size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
