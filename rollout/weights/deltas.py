"""Holds the newest version in host memory, and brings it to the next by the changes that the trainer wrote.

It is brought there apart from the live weights and any staged copy, and counts only once the digest of every
whole tensor was compared. A chain that lacks a link, or has a wrong one, is refused before a byte of the
image changes; an image that was changed and not verified is forgotten, and read from the anchor again.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import WeightError
from protocol.messages import WeightLink, WeightManifest
from protocol.weights.buckets import layout_digest
from protocol.weights.deltas import BYTES, Delta, apply_change, bits, chain_after, read_delta
from rollout.weights.verification import Deadline

READ_BYTES = 64 << 20
"""Bytes of a file that are read before the deadline is checked again."""


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
        known = chain_after(links, self._digest) if layout == self._layout else -1
        anchor = place / links[0].directory
        if known < 0:
            for index, nbytes in enumerate(manifest.buckets):
                _check_size(anchor / f"bucket_{index:05d}.bin", nbytes)
        first = max(known, 0)
        deltas = []
        for base, link in zip(links[first:], links[first + 1 :], strict=False):
            deltas.append(read_delta(place / link.directory, base, link, len(manifest.tensors)))
            _check_size(place / link.directory / BYTES, link.nbytes)
        if known < 0 or deltas:
            self._digest = None
        if known < 0:
            self._read_anchor(anchor, manifest.buckets, deadline)
        for delta, link in zip(deltas, links[first + 1 :], strict=True):
            self._apply(delta, link, manifest, deadline)
        self._layout = layout
        return [torch.from_numpy(bucket) for bucket in self._buckets]

    def verified(self, manifest: WeightManifest) -> None:
        """Count the buckets as a version: every tensor's digest was compared."""
        self._digest = manifest.digest

    def _read_anchor(self, directory: Path, buckets: Sequence[int], deadline: Deadline) -> None:
        """Read all bytes of an anchor; into the memory of the image, where they fit."""
        if [len(bucket) for bucket in self._buckets] != list(buckets):
            self._buckets = []  # before the others are allocated
            self._buckets = [np.empty(nbytes, np.uint8) for nbytes in buckets]
        for index, bucket in enumerate(self._buckets):
            self._read(directory / f"bucket_{index:05d}.bin", bucket, deadline)

    def _apply(self, delta: Delta, link: WeightLink, manifest: WeightManifest, deadline: Deadline) -> None:
        data = np.empty(link.nbytes, np.uint8)
        self._read(Path(manifest.location).parent / link.directory / BYTES, data, deadline)
        for change in delta.changes:
            entry = manifest.tensors[change.tensor]
            target = self._buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
            apply_change(change, data, bits(target, getattr(torch, entry.dtype).itemsize), entry)

    def _read(self, path: Path, target: NDArray[np.uint8], deadline: Deadline) -> None:
        """Read a file. Raises WeightError if it cannot be read, or in time."""
        try:
            with path.open("rb", buffering=0) as file:
                done = 0
                while done < len(target):
                    deadline.remaining(f"reading {path}")
                    count = file.readinto(target[done : done + READ_BYTES].data)
                    if not count:
                        raise WeightError(f"{path}: {done} bytes, expected {len(target)}")
                    done += count
        except OSError as error:
            raise WeightError(f"{path}: {error.strerror or error}") from error
        self.read += done


def _check_size(path: Path, nbytes: int) -> None:
    """Compare a file with the manifest, before anything is read. Raises WeightError."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise WeightError(f"{path}: {error.strerror or error}") from error
    if size != nbytes:
        raise WeightError(f"{path}: {size} bytes, the manifest says {nbytes}")
