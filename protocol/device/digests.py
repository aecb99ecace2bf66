"""Digests tensors where they lie, for the trainer and the engines.

Tensors in host memory are digested at once, those on a GPU by kernels on the current stream, so that the host
waits only once.
"""

from collections.abc import Iterable

import numpy as np
import torch

from protocol.device.slice_digests import BATCH_BYTES, BATCH_TENSORS, SliceSums
from protocol.weights.boxes import whole
from protocol.weights.digests import digest, digests_of_sums, rows_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> an integer dtype of that size."""


class Digests:
    """Digests of dense tensors, in the order in which they are added.

    A tensor on a GPU is referenced until the kernel that reads it is queued. Kernels are queued on the stream
    that is current at each call, which must always be the same.
    """

    def __init__(self) -> None:
        self._digests: list[int] = []
        """Digest of each tensor; 0 of one on a GPU until `numbers`."""
        self._on_gpu: dict[int, int] = {}
        """Index -> bytes, of the tensors on a GPU."""
        self._waiting: list[torch.Tensor] = []
        """Those for which no kernel is queued yet."""
        self._bytes = 0
        """Bytes of `_waiting`."""
        self._sums: list[torch.Tensor] = []
        """Sums of their rows, int64 on the GPU."""

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor; work that overwrites it must not be queued before `launch` or `numbers`."""
        dense = tensor.detach().contiguous()
        if not dense.is_cuda:
            # `Tensor.numpy` would keep memory from being released: an engine that sleeps resizes it
            self._digests.append(digest(np.from_dlpack(dense.reshape(-1).view(torch.uint8)).data))
            return
        self._on_gpu[len(self._digests)] = dense.nbytes
        self._digests.append(0)
        self._waiting.append(dense)
        self._bytes += dense.nbytes
        if self._bytes >= BATCH_BYTES or len(self._waiting) == BATCH_TENSORS:
            self.launch()

    def numbers(self) -> list[int]:
        """Return the digests of all tensors; waits for the stream."""
        self.launch()
        if self._sums:
            sums = torch.cat(self._sums).cpu().numpy()
            found = digests_of_sums(sums, list(self._on_gpu.values()))
            for index, number in zip(self._on_gpu, found, strict=True):
                self._digests[index] = number
        return self._digests

    def launch(self) -> None:
        """Queue the kernels that are not queued yet, on the current stream."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            sums = SliceSums(sum(rows_of(tensor.nbytes) for tensor in waiting), waiting[0].device)
            first = 0
            for tensor in waiting:
                sums.add(tensor, tensor.shape, whole(tensor.shape), first)
                first += rows_of(tensor.nbytes)
            sums.launch()
            self._sums.append(sums.total)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the memory as integers, which compare bit by bit."""
    return tensor.view(INTEGERS[tensor.element_size()])


def digests_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digests of dense tensors on any device."""
    found = Digests()
    for tensor in tensors:
        found.add(tensor)
    return found.numbers()
