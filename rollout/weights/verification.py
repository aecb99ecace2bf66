"""Views the bytes of a version as tensors and verifies these against the manifest, for all receivers."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from protocol.device.digests import digests_of
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import manifest_digest
from protocol.weights.provisional import is_provisional, with_digests

POLL_S = 0.0005
"""Interval at which a stream is polled."""
AHEAD = 4
"""Buckets in flight at a time."""


class Deadline:
    """The time by which a version must have been received."""

    def __init__(self, manifest: WeightManifest, seconds: float) -> None:
        self._what = f"version {manifest.version} over {manifest.transport}"
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self, doing: str) -> float:
        """Return the seconds left.

        Args:
            doing: name of the caller's wait, for the error.

        Raises:
            WeightError: none are left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightError(f"{self._what}: not complete within {self._seconds:g} s while {doing}")
        return left


def in_buckets(manifest: WeightManifest) -> Iterator[tuple[int, Sequence[TensorEntry]]]:
    """Yield every bucket's index with its entries by offset."""
    entries: list[list[TensorEntry]] = [[] for _ in manifest.buckets]
    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset)):
        entries[entry.bucket].append(entry)
    yield from enumerate(entries)


def view(entry: TensorEntry, bucket: torch.Tensor) -> torch.Tensor:
    """Return the tensor of `entry` as a view of its bucket.

    Args:
        entry: the tensor.
        bucket: uint8, in aligned storage.

    Raises:
        WeightError: the entry's offset is not aligned for its dtype.
    """
    try:
        return (
            bucket[entry.offset : entry.offset + entry.nbytes]
            .view(getattr(torch, entry.dtype))
            .view(entry.shape)
        )
    except RuntimeError as error:
        raise WeightError(f"tensor {entry.name} at offset {entry.offset}: {error}") from error


def verify(entry: TensorEntry, tensor: torch.Tensor) -> None:
    """Compare the bytes of a host tensor with the digest of its entry.

    Raises:
        WeightError: they differ; names the tensor.
    """
    compare(entry, digests_of([tensor])[0])


def wait_for_queue(manifest: WeightManifest, deadline: Deadline, disconnected: Callable[[], bool]) -> None:
    """Wait for the work queued on the current stream of a GPU.

    Raises:
        WeightError: it has not ended in time, or the sender has disconnected.
    """
    queued = torch.cuda.Event()
    queued.record()
    while not queued.query():  # `synchronize` would have no deadline
        deadline.remaining("receiving")
        refuse_if(disconnected, manifest)
        time.sleep(POLL_S)
    refuse_if(disconnected, manifest)  # a sender that disconnected may have overwritten what was read


def refuse_if(disconnected: Callable[[], bool], manifest: WeightManifest) -> None:
    """Raise WeightError if the sender has disconnected."""
    if disconnected():
        raise WeightError(f"version {manifest.version}: the sender disconnected in the middle")


def compare(entry: TensorEntry, found: int) -> None:
    """Raise WeightError if this is not the digest of the entry; names the tensor."""
    if found != entry.digest:
        raise WeightError(
            f"tensor {entry.name}: digest {found:016x} of the received bytes, expected {entry.digest:016x}"
        )


def version_digest(manifest: WeightManifest, digests: Sequence[int]) -> int:
    """Return the digest of a version from its received tensors' digests, in the manifest's order.

    A provisional manifest has no digests to compare with.

    Raises:
        WeightError: a digest differs from its entry's; names the tensor.
    """
    if is_provisional(manifest):
        return manifest_digest(with_digests(manifest, digests).tensors)
    for entry, found in zip(manifest.tensors, digests, strict=True):
        compare(entry, found)
    return manifest.digest
