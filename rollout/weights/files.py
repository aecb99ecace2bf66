"""Receives a version from files: `location` contains one file per bucket, or changes.

`location` is a directory, or a URL supported by fsspec.
"""

import mmap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from protocol.device.slice_digests import Digests
from protocol.errors import WeightError, error_text
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import bucket_name
from protocol.weights.slices import Wanted
from rollout.weights.base import Destination, ReceivedSlice, no_destination, whole_tensor
from rollout.weights.deltas import VersionImage
from rollout.weights.verification import Deadline, compare

MADV_POPULATE_READ = 22
"""Advice of madvise(2) to read all pages at once; not yet in the module mmap."""
READ_BYTES = 16 << 20
"""Bytes per madvise call, which takes a few milliseconds."""


class FileReceiver:
    """Receiver that maps `bucket_00000.bin` ... without copying; a sender may unlink mapped files.

    A version at a URL is read into host memory. A version with a chain is computed there from the previous
    version and the changes.
    """

    is_persistent = True

    def __init__(self, *, shared: bool = False) -> None:
        """Start without a version.

        Args:
            shared: whether to map files as memory shared with their writer, if the file system supports it,
                because locking a private page copies it.
        """
        self.digest = 0
        self.is_lockable = False
        self._shared = shared
        self._deadline: Deadline | None = None
        """Deadline of the last `slices`."""
        self._image = VersionImage()

    def slices(
        self,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline_s: float,
        place: Destination = no_destination,
    ) -> Iterator[list[ReceivedSlice]]:
        deadline, digests = Deadline(manifest, deadline_s), Digests()
        self._deadline = deadline
        self.is_lockable = True
        if manifest.chain or "://" in manifest.location:
            yield from self._made(manifest, deadline, digests)
            return
        mapped, bucket = -1, torch.empty(0, dtype=torch.uint8)
        for entry in manifest.tensors:
            deadline.remaining(f"reading {entry.name}")
            if entry.bucket != mapped:
                path = Path(manifest.location) / bucket_name(entry.bucket)
                mapped = entry.bucket
                bucket, is_shared = _map(path, manifest.buckets[mapped], entry, self._shared)
                self.is_lockable = self.is_lockable and is_shared
            tensor = _view(entry, bucket)
            digests.add(tensor)
            yield whole_tensor(entry, tensor)
        compare(manifest, digests.numbers())
        self.digest = manifest.digest

    def close(self) -> None:
        """Stop reading; a mapping ends with the last tensor that uses it."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _made(
        self, manifest: WeightManifest, deadline: Deadline, digests: Digests
    ) -> Iterator[list[ReceivedSlice]]:
        buckets = self._image.advance(manifest, deadline)
        for entry in manifest.tensors:
            deadline.remaining(f"reading {entry.name}")
            tensor = _view(entry, buckets[entry.bucket])
            digests.add(tensor)
            yield whole_tensor(entry, tensor)
        compare(manifest, digests.numbers())
        self._image.verified(manifest)
        self.digest = manifest.digest


def _map(path: Path, nbytes: int, first: TensorEntry, shared: bool) -> tuple[torch.Tensor, bool]:
    """Return a file's bytes, and whether their pages are shared with its writer.

    Pages are private if the file is not writable, or its file system does not support sharing, such as some
    FUSE file systems.
    """
    # torch requires writable memory. This module never writes to it; writes to a copy are private.
    if shared:
        with suppress(OSError):
            return _mapped(path, nbytes, first, "r+b", mmap.ACCESS_WRITE), True
    try:
        return _mapped(path, nbytes, first, "rb", mmap.ACCESS_COPY), False
    except OSError as error:
        raise WeightError(f"{path}: {error_text(error)} (first tensor {first.name})") from error


def _mapped(path: Path, nbytes: int, first: TensorEntry, mode: str, access: int) -> torch.Tensor:
    with path.open(mode) as file:
        size = file.seek(0, 2)
        if size < nbytes:
            raise WeightError(f"{path}: {size} bytes, the manifest says {nbytes} (first tensor {first.name})")
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = mmap.mmap(file.fileno(), nbytes, access=access)
    with suppress(OSError):  # before Linux 5.14, pages are read on demand
        for first_byte in range(0, nbytes, READ_BYTES):
            memory.madvise(MADV_POPULATE_READ, first_byte, min(READ_BYTES, nbytes - first_byte))
            time.sleep(0)  # madvise holds the GIL, which the engine's next step may need
    return torch.frombuffer(memory, dtype=torch.uint8)


def _view(entry: TensorEntry, bucket: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a view of its bucket. Raises WeightError for an unaligned offset."""
    try:
        raw = bucket[entry.offset : entry.offset + entry.nbytes]
        return raw.view(getattr(torch, entry.dtype)).view(entry.shape)
    except RuntimeError as error:
        raise WeightError(f"tensor {entry.name} at offset {entry.offset}: {error}") from error
