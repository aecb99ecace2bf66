"""Verifies every whole tensor of a version, even if this rank received only slices of it."""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.device.slice_digests import SliceSums
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.boxes import Box
from protocol.weights.buckets import manifest_digest
from protocol.weights.digests import digests_of_sums, rows_of
from protocol.weights.provisional import is_provisional, with_digests
from protocol.weights.slices import Span

POLL_S = 0.0005
"""Seconds between polls of a stream."""


class Deadline:
    """Deadline for receiving a version."""

    def __init__(self, manifest: WeightManifest, seconds: float) -> None:
        self._what = f"version {manifest.version} over {manifest.transport}"
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Let the next `remaining` raise and `sleep` end; callable from other threads."""
        self._cancelled.set()

    def remaining(self, doing: str = "waiting for the sender") -> float:
        """Return the remaining seconds.

        Args:
            doing: description of the caller's wait, for the error.

        Raises:
            WeightError: the deadline has passed or was cancelled.
        """
        if self._cancelled.is_set():
            raise WeightError(f"{self._what}: cancelled while {doing}")
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightError(f"{self._what}: not complete within {self._seconds:g} s while {doing}")
        return left

    def sleep(self, seconds: float, doing: str) -> None:
        """Sleep until the deadline at most. Raises WeightError if it has passed or was cancelled."""
        self._cancelled.wait(min(seconds, self.remaining(doing)))


class SliceVerification:
    """Accumulator of the sums of all slices of a version, received or not; compares the tensors' digests."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self._firsts = list(accumulate((rows_of(entry.nbytes) for entry in manifest.tensors), initial=0))
        """Index of each tensor's first row sum, and the total number of sums."""
        self._received: SliceSums | None = None
        """Sums of received slices, on their device."""
        self._sent: list[tuple[Sequence[Span], torch.Tensor]] = []
        """(spans, sums) sent by the trainer's ranks."""
        self.digest = 0
        """Digest of the version after `finish`."""

    def add(self, index: int, box: Box, tensor: torch.Tensor, copy: torch.Tensor | None = None) -> None:
        """Add a received slice, which is referenced until its read is queued on the current stream.

        Args:
            index: index of the slice's tensor.
            box: position in the tensor.
            copy: dense memory to copy the slice to in the same pass; complete after `launch`.
        """
        if self._received is None:
            self._received = SliceSums(self._firsts[-1], tensor.device)
        self._received.add(tensor, self._manifest.tensors[index].shape, box, self._firsts[index], copy)

    def launch(self) -> None:
        """Queue the reads of all added slices."""
        if self._received is not None:
            self._received.launch()

    def add_sums(self, spans: Sequence[Span], sums: torch.Tensor) -> None:
        """Add consecutive sums of spans."""
        self._sent.append((spans, sums))

    def wait(self, deadline: Deadline, disconnected: Callable[[], bool]) -> None:
        """Wait for queued GPU work. Raises WeightError after a disconnect or timeout."""
        received = [self._received.total] if self._received is not None else []
        if any(sums.is_cuda for sums in [*received, *(sums for _, sums in self._sent)]):
            wait_for_queue(self._manifest, deadline, disconnected)
        else:
            raise_if_disconnected(disconnected, self._manifest)

    def finish(self) -> None:
        """Compare the digests; with a provisional manifest, compute the version's digest.

        Raises:
            WeightError: a tensor's bytes do not match its digest; the message names the tensor.
        """
        sizes = [entry.nbytes for entry in self._manifest.tensors]
        self.digest = version_digest(self._manifest, digests_of_sums(self._added_up(), sizes))

    def _added_up(self) -> NDArray[np.int64]:
        """Return the sums of all rows of all tensors: int64 [rows]."""
        if self._received is None:
            total = np.zeros(self._firsts[-1], np.int64)
        else:
            total = self._received.total.cpu().numpy()  # waits once, for all tensors
        for spans, sent in self._sent:
            position, sums = 0, sent.cpu().numpy()
            for index, first, end in spans:
                row = self._firsts[index]
                total[row + first : row + end] += sums[position : position + end - first]
                position += end - first
        return total


def wait_for_queue(manifest: WeightManifest, deadline: Deadline, disconnected: Callable[[], bool]) -> None:
    """Wait for the work queued on the current GPU stream.

    Raises:
        WeightError: the deadline has passed, or the sender has disconnected.
    """
    queued = torch.cuda.Event()
    queued.record()
    while not queued.query():  # `synchronize` has no timeout
        deadline.remaining("receiving")
        raise_if_disconnected(disconnected, manifest)
        time.sleep(POLL_S)
    # a disconnected sender may have overwritten the bytes that were read
    raise_if_disconnected(disconnected, manifest)


def raise_if_disconnected(disconnected: Callable[[], bool], manifest: WeightManifest) -> None:
    """Raise WeightError if the sender has disconnected."""
    if disconnected():
        raise WeightError(f"version {manifest.version}: the sender disconnected in the middle")


def version_digest(manifest: WeightManifest, digests: Sequence[int]) -> int:
    """Return the digest of a version from its tensors' digests, in the manifest's order.

    A provisional manifest has no digests to compare with.

    Raises:
        WeightError: a digest differs from its entry's; the message names the tensor.
    """
    if is_provisional(manifest):
        return manifest_digest(with_digests(manifest, digests).tensors)
    compare(manifest, digests)
    return manifest.digest


def compare(manifest: WeightManifest, digests: Sequence[int]) -> None:
    """Check the digests of received tensors against the manifest, in its order.

    Raises:
        WeightError: a digest differs; the message names the tensor.
    """
    for entry, found in zip(manifest.tensors, digests, strict=True):
        if found != entry.digest:
            raise WeightError(
                f"tensor {entry.name}: digest {found:016x} of the received bytes, "
                f"expected {entry.digest:016x}"
            )
