"""Holds the newest version in host memory, and brings it to the next by the changes that the trainer wrote.

It is brought there apart from the live weights and any staged copy, and counts only once the digest of every
whole tensor was compared. A chain that lacks a link, or has a wrong one, is refused before a byte of the
image changes; an image that was changed and not verified is forgotten, and read from the anchor again.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from protocol.weights.deltas import BYTES, apply_change, bits, chain_after, read_delta
from rollout.weights.verification import Deadline


class VersionImage:
    """All bytes of one version, in the buckets of its manifest."""

    def __init__(self) -> None:
        self.read = 0
        """Bytes of buckets and changes that the last `advance` has read."""
        self._buckets: list[NDArray[np.uint8]] = []
        self._digest: int | None = None
        """Digest of the verified version that the buckets hold."""
        self._layout = 0

    def advance(self, manifest: WeightManifest, deadline: Deadline) -> list[torch.Tensor]:
        """Return the buckets of a version, from the last one that was verified or from the anchor.

        Raises:
            WeightError: a link of the chain is missing, damaged or of another version; names it.
        """
        links, place = manifest.chain, Path(manifest.location).parent
        if links[-1].directory != Path(manifest.location).name or links[-1].digest != manifest.digest:
            raise WeightError(f"version {manifest.version}: its chain ends with {links[-1].directory}")
        layout, self.read = layout_digest(manifest), 0
        first = chain_after(links, self._digest) if layout == self._layout else -1
        pairs = zip(links[max(first, 0) :], links[max(first, 0) + 1 :], strict=False)
        deltas = [
            (read_delta(place / link.directory, base, link, len(manifest.tensors)), place / link.directory)
            for base, link in pairs
        ]
        contents = [self._bytes_of(directory / BYTES) for _, directory in deltas]
        if first < 0:
            anchor = [
                self._bytes_of(place / links[0].directory / f"bucket_{index:05d}.bin", nbytes)
                for index, nbytes in enumerate(manifest.buckets)
            ]
            self._digest, self._buckets = None, anchor
        if deltas:
            self._digest = None
        for (delta, directory), data in zip(deltas, contents, strict=True):
            deadline.remaining(f"applying {directory.name}")
            for change in delta.changes:
                entry = manifest.tensors[change.tensor]
                target = self._buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
                itemsize = getattr(torch, entry.dtype).itemsize
                apply_change(change, data, bits(target, itemsize), entry)
        self._layout = layout
        return [torch.from_numpy(bucket) for bucket in self._buckets]

    def verified(self, manifest: WeightManifest) -> None:
        """Count the buckets as a version: every tensor's digest was compared."""
        self._digest = manifest.digest

    def _bytes_of(self, path: Path, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Read a file. Raises WeightError if it is missing, or has not so many bytes."""
        try:
            data = np.fromfile(path, np.uint8)
        except OSError as error:
            raise WeightError(f"{path}: {error.strerror or error}") from error
        if nbytes is not None and len(data) < nbytes:
            raise WeightError(f"{path}: {len(data)} bytes, the manifest says {nbytes}")
        self.read += len(data)
        return data
