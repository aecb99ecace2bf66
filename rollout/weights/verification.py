"""Views the bytes of a version as tensors and verifies these against the manifest, for all receivers."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from protocol.device.digests import Digests, digests_of
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


class Verification:
    """Compares the tensors of a version with their digests: host tensors at once, GPU tensors at the end.

    For a provisional manifest it computes the digests in the same way.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self._computed: dict[str, int] | None = {} if is_provisional(manifest) else None
        """Name -> digest, for a provisional manifest."""
        self._on_gpu: list[TensorEntry] = []
        """Entries of GPU tensors, which are compared at the end."""
        self._digests = Digests()
        """Digests of `_on_gpu`."""

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Add a tensor; one on a GPU is referenced, and must not be overwritten before `finish`.

        Raises:
            WeightError: its bytes do not match its digest; names the tensor.
        """
        if tensor.is_cuda:
            self._on_gpu.append(entry)
            self._digests.add(tensor)
        else:
            self._record(entry, digests_of([tensor])[0])

    def finish(self, deadline: Deadline, disconnected: Callable[[], bool] = lambda: False) -> int:
        """Wait for the work queued on the current stream, compare the GPU tensors, and return the digest.

        Args:
            deadline: of the version.
            disconnected: returns whether the sender has disconnected, so that the queued work may never end.

        Returns:
            The digest of the version.

        Raises:
            WeightError: a tensor's bytes do not match its digest, or have not been received.
        """
        if self._on_gpu:
            self._compare_on_gpu(deadline, disconnected)
        else:
            refuse_if(disconnected, self._manifest)
        if self._computed is None:
            return self._manifest.digest
        digests = [self._computed[entry.name] for entry in self._manifest.tensors]
        return manifest_digest(with_digests(self._manifest, digests).tensors)

    def _compare_on_gpu(self, deadline: Deadline, disconnected: Callable[[], bool]) -> None:
        self._digests.launch()
        wait_for_queue(self._manifest, deadline, disconnected)
        for entry, found in zip(self._on_gpu, self._digests.numbers(), strict=True):
            self._record(entry, found)

    def _record(self, entry: TensorEntry, found: int) -> None:
        if self._computed is None:
            compare(entry, found)
        else:
            self._computed[entry.name] = found


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
