"""Writes the files of a version: its buckets, from one process or from all ranks of one host at once."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from protocol.device.slice_digests import SliceSums
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.boxes import Box, relative, whole
from protocol.weights.provisional import with_digests
from trainer.config import WeightConfig
from trainer.ranks.collectives import broadcast_message, gather_bytes, next_message
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import BucketContents, Named, drain, fill_buckets
from trainer.weights.served.layout import PartReport, PieceRows, checked_pieces
from trainer.weights.version_directories import bucket_path

RequireSpace = Callable[[int], None]
"""Takes a number of bytes; raises WeightError if there is no room for them."""
NO_VERSION = ""
"""In place of a directory: rank 0 publishes no version after all."""


class VersionWriter:
    """Copies each tensor into a mapped file and digests it there, in one pass over the bytes."""

    def __init__(self, config: WeightConfig, require_space: RequireSpace) -> None:
        """Write buckets of `config.bucket_mb`."""
        self._bucket_bytes = config.bucket_mb << 20
        self._require_space = require_space
        self._last_bytes = 0

    def write(self, tensors: Named, version: int, aside: Path, name: str) -> BucketContents:
        """Write the bytes of a version into its directory.

        Args:
            tensors: the version's.
            version: its number.
            aside: an empty directory to write to.
            name: name that the directory will have.

        Raises:
            OSError: they cannot be written.
            WeightError: they cannot be published; names the tensor.
        """
        self._require_space(self._last_bytes)

        def allocate(index: int, size: int) -> torch.Tensor:
            return _mapped(_created(bucket_path(aside, index), size))

        def reserve(index: int, offset: int, nbytes: int) -> None:
            self._reserve(bucket_path(aside, index), offset, nbytes)

        contents = fill_buckets(tensors, self._bucket_bytes, allocate, reserve)
        for index, nbytes in enumerate(contents.buckets):
            os.truncate(bucket_path(aside, index), nbytes)
        return contents

    def completed(self, manifest: WeightManifest, aside: Path) -> WeightManifest:
        """Return the manifest of the version that was written, with what engines need to read it."""
        return manifest

    def published(self, manifest: WeightManifest) -> None:
        """Note that engines can read a version from now on."""
        self._last_bytes = sum(manifest.buckets)

    def failed(self) -> None:
        """Note that the version is not published, perhaps before `write` was called."""

    def _reserve(self, bucket: Path, offset: int, nbytes: int) -> None:
        """Allocate pages before they are written: writing to one that cannot be allocated raises SIGBUS."""
        self._require_space(nbytes)
        with bucket.open("rb+") as file:
            os.posix_fallocate(file.fileno(), offset, nbytes)


class PartWriter(VersionWriter):
    """Rank 0's writer of versions to which each rank of the host writes its own pieces.

    Rank 0 makes the files and names their directory to the others; each copies its pieces to their places in
    the mapped files, and sends rank 0 their sums.
    """

    def __init__(self, config: WeightConfig, require_space: RequireSpace, blank: WeightManifest) -> None:
        """Write versions with the layout of `blank_manifest`."""
        super().__init__(config, require_space)
        self._blank = blank
        self._rows = PieceRows(blank)
        self._told = False
        """Whether the other ranks know what becomes of the version."""

    def write(self, tensors: Named, version: int, aside: Path, name: str) -> BucketContents:
        self._require_space(sum(self._blank.buckets))
        for index, nbytes in enumerate(self._blank.buckets):
            bucket = _created(bucket_path(aside, index), nbytes)
            if nbytes:
                self._reserve(bucket, 0, nbytes)
        self._tell(str(aside))
        report = write_part(self._blank, self._rows, 0, tensors, aside)
        reports = [msgspec.msgpack.decode(data, type=PartReport) for data in gather_bytes(_encoded(report))]
        if problem := next((report.error for report in reports if report.error), ""):
            raise WeightError(f"version {version}: {problem}")
        digests = self._rows.digests([np.frombuffer(report.sums, np.int64) for report in reports])
        return BucketContents(with_digests(self._blank, digests).tensors, self._blank.buckets)

    def published(self, manifest: WeightManifest) -> None:
        self._told = False

    def failed(self) -> None:
        if not self._told:
            self._tell(NO_VERSION)
        self._told = False

    def _tell(self, directory: str) -> None:
        self._told = True
        broadcast_message(msgspec.msgpack.encode(directory))


class PartFollower(WeightSender):
    """Another rank's `WeightSender`: writes its pieces where rank 0 says."""

    in_parts = True

    def __init__(self, rank: int, blank: WeightManifest) -> None:
        """Write this rank's pieces of versions with the layout of `blank_manifest`."""
        self._rank, self._blank, self._rows = rank, blank, PieceRows(blank)

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Named,
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        directory = msgspec.msgpack.decode(next_message(), type=str)
        if directory == NO_VERSION:
            drain(tensors)
        else:
            report = write_part(self._blank, self._rows, self._rank, tensors, Path(directory))
            gather_bytes(_encoded(report))
        return self._blank

    def retire(self, in_use: frozenset[int]) -> None:
        """Return at once: rank 0 removes versions."""

    def close(self) -> None:
        """Return at once: versions are rank 0's."""


def write_part(
    blank: WeightManifest, rows: PieceRows, rank: int, tensors: Named, directory: Path
) -> PartReport:
    """Copy a rank's pieces to their places in the files of a version, and digest them.

    Args:
        blank: layout of the version.
        rows: places of the sums.
        rank: this rank's number.
        tensors: its pieces.
        directory: has the files, in their sizes.

    Returns:
        The sums, or why the part could not be written.
    """
    buckets: dict[int, torch.Tensor] = {}
    sums: SliceSums | None = None
    position = 0
    spans = rows.pieces[rank]
    try:
        for number, (piece, tensor) in enumerate(checked_pieces(blank, rank, tensors)):
            entry, (first, end) = blank.tensors[piece.tensor], spans[number]
            sums = sums or SliceSums(sum(last - begin for begin, last in spans), tensor.device)
            sums.add(tensor.detach(), entry.shape, piece.box, position - first)
            position += end - first
            if tensor.numel():
                if entry.bucket not in buckets:
                    buckets = {entry.bucket: _mapped(bucket_path(directory, entry.bucket))}
                _place(buckets[entry.bucket], blank, piece.tensor, piece.box).copy_(tensor.detach())
    except (WeightError, OSError) as error:
        drain(tensors)
        return PartReport("", f"rank {rank}: {error}", b"")
    if sums is None:
        return PartReport("", "", b"")
    sums.launch()
    return PartReport("", "", sums.total.cpu().numpy().tobytes())


def _place(bucket: torch.Tensor, blank: WeightManifest, tensor: int, box: Box) -> torch.Tensor:
    """Return a box of a tensor in its bucket."""
    entry = blank.tensors[tensor]
    raw = bucket[entry.offset : entry.offset + entry.nbytes]
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)[relative(box, whole(entry.shape))]


def _created(bucket: Path, size: int) -> Path:
    """Create a sparse file of `size` bytes and return its path."""
    with bucket.open("xb+") as file:
        os.truncate(file.fileno(), size)
    return bucket


def _mapped(bucket: Path) -> torch.Tensor:
    """Return a file as a uint8 tensor, which writes to it."""
    with bucket.open("rb+") as file:
        size = file.seek(0, 2)
        memory = mmap.mmap(file.fileno(), size) if size else bytearray()
    return torch.frombuffer(memory, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _encoded(report: PartReport) -> bytes:
    return msgspec.msgpack.encode(report)
