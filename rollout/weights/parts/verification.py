"""Verifies every whole tensor of a version, of which this rank received slices."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.device.slice_digests import SliceSums
from protocol.messages import WeightManifest
from protocol.weights.boxes import Box
from protocol.weights.digests import digest_of_sums, rows_of
from rollout.weights.verification import Deadline, refuse_if, version_digest, wait_for_queue


class SliceVerification:
    """Adds up the sums of all slices of a version, received or not, and compares its tensors' digests."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self._firsts = list(accumulate((rows_of(entry.nbytes) for entry in manifest.tensors), initial=0))
        """Index of the sum of each tensor's first row, and the number of all."""
        self._received: SliceSums | None = None
        """Sums of the received slices, where these lie."""
        self._sent: list[tuple[Sequence[tuple[int, int, int]], torch.Tensor]] = []
        """Sums that the trainer's ranks have sent, with their spans."""
        self.digest = 0
        """The version's digest, once `finish` has returned."""

    def add(self, index: int, box: Box, tensor: torch.Tensor) -> None:
        """Add a received slice, which is kept until its read is queued on the current stream."""
        if self._received is None:
            self._received = SliceSums(self._firsts[-1], tensor.device)
        self._received.add(tensor, self._manifest.tensors[index].shape, box, self._firsts[index])

    def launch(self) -> None:
        """Queue the reads of all slices that were added."""
        if self._received is not None:
            self._received.launch()

    def add_sums(self, spans: Sequence[tuple[int, int, int]], sums: torch.Tensor) -> None:
        """Add sums that follow each other: (tensor, first row, after the last) of each."""
        self._sent.append((spans, sums))

    def wait(self, deadline: Deadline, disconnected: Callable[[], bool]) -> None:
        """Wait for what was queued on a GPU. Raises WeightError if it does not come, or not in time."""
        received = [self._received.total] if self._received is not None else []
        if any(sums.is_cuda for sums in [*received, *(sums for _, sums in self._sent)]):
            wait_for_queue(self._manifest, deadline, disconnected)
        else:
            refuse_if(disconnected, self._manifest)

    def finish(self) -> None:
        """Compare the digests, or with a provisional manifest compute the version's digest.

        Raises:
            WeightError: a tensor's bytes do not match its digest; names the tensor.
        """
        manifest, sums = self._manifest, self._added_up()
        digests = [
            digest_of_sums(sums[first:end], entry.nbytes)
            for entry, (first, end) in zip(manifest.tensors, pairwise(self._firsts), strict=True)
        ]
        self.digest = version_digest(manifest, digests)

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
