"""Receives slices through process groups of two ranks; the sender is `trainer/weights/parts/channel.py`."""

from collections.abc import Iterable, Iterator

import torch

from protocol.messages import TensorEntry
from protocol.weights.boxes import shape_of
from protocol.weights.slices import Cut, Transfer
from rollout.weights.nccl import PairChannel
from rollout.weights.parts.receiver import PartTransfer


class PairSlices(PairChannel):
    """Receives packed cuts of one trainer rank's pieces, and then sums."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("cpu")

    def slices(self, transfer: PartTransfer) -> Iterator[tuple[Cut, torch.Tensor]]:
        self._device = self.join(transfer.answer, transfer.manifest, transfer.deadline, transfer.line)
        memories = _memories(transfer.plan.buckets, self._device)
        for bucket, memory in self.received(memories, transfer.deadline, transfer.disconnected):
            for cut in bucket:
                yield cut, cut_in(memory, cut, transfer.manifest.tensors[cut.tensor])

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        sums = torch.empty(count, dtype=torch.int64, device=self._device)
        for _ in self.received([(None, sums.view(torch.uint8))], transfer.deadline, transfer.disconnected):
            pass
        return sums


def cut_in(memory: torch.Tensor, cut: Cut, entry: TensorEntry) -> torch.Tensor:
    """Return the elements of a cut in the memory of its bucket, in their shape."""
    part = memory[cut.offset : cut.offset + cut.nbytes].view(getattr(torch, entry.dtype))
    return part.view(shape_of(cut.box))


def _memories(
    buckets: Iterable[tuple[Cut, ...]], device: torch.device
) -> Iterator[tuple[tuple[Cut, ...], torch.Tensor]]:
    for bucket in buckets:
        yield bucket, torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=device)
