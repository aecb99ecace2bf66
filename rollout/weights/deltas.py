"""Keeps the latest version in host memory, and updates it with the changes that the trainer wrote.

The image is separate from the live weights and from any staged copy. It becomes valid only after the digests
of all whole tensors were compared. A chain with a missing or wrong link is refused before a byte of the image
changes. An image that was changed but not verified is discarded, and read again from the anchor.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.device.changes import Changes, apply
from protocol.device.slice_digests import bits_of
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightLink, WeightManifest
from protocol.weights.boxes import relative, whole
from protocol.weights.buckets import DTYPE_BYTES, bucket_name, layout_digest
from protocol.weights.deltas import (
    INDEX,
    NO_BASE,
    Delta,
    TensorChange,
    chain_after,
    changes_name,
    check_change,
    coded_bytes,
    read_delta,
)
from rollout.weights.ranges import RangeReader, range_reader
from rollout.weights.verification import Deadline

RUN_BYTES = 256 << 20
"""Maximum bytes of changes held in memory with the image, unless a single tensor's changes are larger."""


class VersionImage:
    """All bytes of one version, in its manifest's buckets."""

    def __init__(self) -> None:
        self.read = 0
        """Bytes of buckets and changes read by the last `advance`."""
        self._buckets: list[NDArray[np.uint8]] = []
        self._digest: int | None = None
        """Digest of the verified version in the buckets."""
        self._layout = 0
        self._anchors: int | None = 0
        """Number of verified anchors; None after a version arrived as changes."""
        self._counted: int | None = None
        """Digest of the last counted anchor; staging it again does not count."""

    def advance(self, manifest: WeightManifest, deadline: Deadline) -> list[torch.Tensor]:
        """Return the buckets of a version, derived from the last verified version or from the anchor.

        Raises:
            WeightError: a link of the chain is missing, damaged or of another version; the message names it.
        """
        root, _, directory = manifest.location.rpartition("/")
        links = manifest.chain or (WeightLink(directory, manifest.digest, sum(manifest.buckets)),)
        if links[-1].directory != directory or links[-1].digest != manifest.digest:
            raise WeightError(f"version {manifest.version}: its chain ends with {links[-1].directory}")
        layout, self.read = layout_digest(manifest), 0
        known = chain_after(links, self._digest) if layout == self._layout else -1
        buckets = [f"{links[0].directory}/{bucket_name(index)}" for index in range(len(manifest.buckets))]
        is_apart = known < 0 and links[0].apart
        base, missing = links[max(known, 0)], links[max(known, 0) + 1 :]
        if is_apart:
            base, missing = NO_BASE, links
        with range_reader(root, deadline) as files:
            indexes = files.contents(f"{link.directory}/{INDEX}" for link in missing)
            deltas = []
            for link, data in zip(missing, indexes, strict=True):
                deltas.append(read_delta(data, base, link, len(manifest.tensors)))
                base = link
            if is_apart or known >= 0:
                buckets = []
            sizes = list(zip(buckets, manifest.buckets, strict=False))
            for delta, link in zip(deltas, missing, strict=True):
                sizes += _files(delta, link)
            files.check_sizes(sizes)
            if known < 0 or deltas:
                self._digest = None
            if known < 0:
                self._allocate(manifest.buckets)
            for name, bucket in zip(buckets, self._buckets, strict=False):
                files.read(name, bucket)
                self.read += len(bucket)
            for delta, link in zip(deltas, missing, strict=True):
                self._apply(files, delta, link, manifest)
        self._layout = layout
        return [torch.from_numpy(bucket) for bucket in self._buckets]

    def verified(self, manifest: WeightManifest) -> None:
        """Mark the buckets as verified, after every tensor's digest was compared.

        The buckets are released if no changes are expected: without `weights.delta`, all versions are
        anchors. Tensors returned by `advance` keep their memory.
        """
        self._digest = manifest.digest
        if len(manifest.chain) > 1:
            self._anchors = None
        if self._anchors is not None:
            self._anchors += manifest.digest != self._counted
            self._counted = manifest.digest
            if self._anchors > 1 or not manifest.chain:
                self._digest, self._buckets = None, []

    def _allocate(self, sizes: Sequence[int]) -> None:
        """Allocate memory for all bytes of an anchor, reusing the image's buckets if they fit."""
        if [len(bucket) for bucket in self._buckets] != list(sizes):
            self._buckets = []  # free the old buckets first
            self._buckets = [np.empty(nbytes, np.uint8) for nbytes in sizes]

    def _apply(self, files: RangeReader, delta: Delta, link: WeightLink, manifest: WeightManifest) -> None:
        """Read and apply changes, one run at a time; an apart anchor consists entirely of changes."""
        for change in delta.changes:
            check_change(change, delta.sizes, manifest.tensors[change.tensor])
        for run in _runs(delta, manifest):
            first, end = run[0].offset, max(_end(change, manifest) for change in run)
            coded = np.empty(end - first, np.uint8)
            files.read(f"{link.directory}/{changes_name(run[0].file)}", coded, first)
            self.read += len(coded)
            for change in run:
                data = torch.from_numpy(coded[change.offset - first : _end(change, manifest) - first])
                self._change(change, data, manifest.tensors[change.tensor])

    def _change(self, change: TensorChange, data: torch.Tensor, entry: TensorEntry) -> None:
        raw = torch.from_numpy(self._buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes])
        tensor = raw.view(getattr(torch, entry.dtype)).view(entry.shape)
        piece = tensor[relative(change.box, whole(entry.shape))] if change.box else tensor
        elements = piece.contiguous()
        apply(Changes(change.width, change.count, data), bits_of(elements).view(-1))
        if not piece.is_contiguous():
            piece.copy_(elements)


def _runs(delta: Delta, manifest: WeightManifest) -> Iterator[list[TensorChange]]:
    """Yield the changes of each file by offset, in runs of at most `RUN_BYTES` or a single change."""
    run: list[TensorChange] = []
    for change in sorted(delta.changes, key=lambda change: (change.file, change.offset)):
        if run and (change.file != run[0].file or _end(change, manifest) - run[0].offset > RUN_BYTES):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _end(change: TensorChange, manifest: WeightManifest) -> int:
    """Return the end offset of a change in its file."""
    itemsize = DTYPE_BYTES[manifest.tensors[change.tensor].dtype]
    return change.offset + coded_bytes(change.width, change.count, itemsize)


def _files(delta: Delta, link: WeightLink) -> list[tuple[str, int]]:
    """Return path and size of each file of changes."""
    return [(f"{link.directory}/{changes_name(i)}", nbytes) for i, nbytes in enumerate(delta.sizes)]
