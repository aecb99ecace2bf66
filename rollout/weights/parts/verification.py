"""Verifies every whole tensor of a version of which slices were received."""

from collections.abc import Callable, Iterable

import torch

from protocol.device.slice_digests import slice_sums
from protocol.messages import WeightManifest
from protocol.weights.boxes import Box
from protocol.weights.buckets import manifest_digest
from protocol.weights.digests import digest_of_sums, rows_of
from protocol.weights.provisional import is_provisional, with_digests
from protocol.weights.slices import sum_span
from rollout.weights.verification import Deadline, compare, refuse_if, wait_for_queue


class SliceVerification:
    """Adds up the sums of all slices of a version, received or not, and compares its tensors' digests."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self._sums: dict[int, torch.Tensor] = {}
        """Index of the tensor -> sums of all of its rows, where its slices lie."""
        self.digest = 0
        """That of the version, once `finish` has returned."""

    def add(self, index: int, box: Box, tensor: torch.Tensor) -> None:
        """Add a received slice; it is read on the current stream."""
        entry = self._manifest.tensors[index]
        first, end = sum_span(entry, box)
        self._of(index, tensor.device)[first:end] += slice_sums(tensor, entry.shape, box)

    def add_sums(self, spans: Iterable[tuple[int, int, int]], sums: torch.Tensor) -> None:
        """Add sums that follow each other: (tensor, first row, after the last) of each."""
        position = 0
        for index, first, end in spans:
            self._of(index, sums.device)[first:end] += sums[position : position + end - first]
            position += end - first

    def wait(self, deadline: Deadline, disconnected: Callable[[], bool]) -> None:
        """Wait for what was queued on a GPU. Raises WeightError if it does not come, or not in time."""
        if any(sums.is_cuda for sums in self._sums.values()):
            wait_for_queue(self._manifest, deadline, disconnected)
        else:
            refuse_if(disconnected, self._manifest)

    def finish(self) -> None:
        """Compare the digests, or with a provisional manifest compute that of the version.

        Raises:
            WeightError: a tensor's bytes do not match its digest; names the tensor.
        """
        manifest = self._manifest
        digests = []
        for index, entry in enumerate(manifest.tensors):
            sums = self._sums.get(index)
            rows = torch.zeros(rows_of(entry.nbytes), dtype=torch.int64) if sums is None else sums.cpu()
            digests.append(digest_of_sums(rows.numpy(), entry.nbytes))
        if is_provisional(manifest):
            self.digest = manifest_digest(with_digests(manifest, digests).tensors)
            return
        for entry, found in zip(manifest.tensors, digests, strict=True):
            compare(entry, found)
        self.digest = manifest.digest

    def _of(self, index: int, device: torch.device) -> torch.Tensor:
        if index not in self._sums:
            rows = rows_of(self._manifest.tensors[index].nbytes)
            self._sums[index] = torch.zeros(rows, dtype=torch.int64, device=device)
        return self._sums[index]
