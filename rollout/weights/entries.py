"""From the bytes of a manifest's entries to verified tensors: what all receivers share."""

import time
from collections.abc import Iterator, Sequence

import torch

from protocol.buckets import digest
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest


class Deadline:
    """A point in time by which a version must have arrived."""

    def __init__(self, manifest: WeightManifest, seconds: float) -> None:
        self._what = f"version {manifest.version} over {manifest.transport}"
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self, doing: str) -> float:
        """Seconds left.

        Raises:
            WeightError: if none are; says what was being done.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightError(f"{self._what}: not complete within {self._seconds:g} s while {doing}")
        return left


def in_buckets(manifest: WeightManifest) -> Iterator[tuple[int, Sequence[TensorEntry]]]:
    """Every bucket with its entries in the order of their offsets."""
    entries: list[list[TensorEntry]] = [[] for _ in manifest.buckets]
    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset)):
        entries[entry.bucket].append(entry)
    yield from enumerate(entries)


def view(entry: TensorEntry, bucket: torch.Tensor) -> torch.Tensor:
    """The tensor of `entry` as a view of its bucket, a uint8 tensor whose storage is aligned.

    Raises:
        WeightError: if the entry's offset is not aligned for its dtype.
    """
    try:
        return bucket[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
    except RuntimeError as error:
        raise WeightError(f"tensor {entry.name} at offset {entry.offset}: {error}") from error


def verify(entry: TensorEntry, tensor: torch.Tensor) -> None:
    """Compare a tensor's bytes with the digest of its entry.

    Raises:
        WeightError: naming the tensor.
    """
    found = digest(raw_bytes(tensor))
    if found != entry.digest:
        raise WeightError(f"tensor {entry.name}: digest {found:016x} of the bytes that arrived, expected {entry.digest:016x}")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order, without a copy if it is dense and on the host."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
