"""Receives slices through process groups of two ranks; the sender is `trainer/weights/parts/channel.py`."""

from collections.abc import Iterable, Iterator

import torch

from protocol.messages import WeightManifest
from protocol.weights.boxes import shape_of
from protocol.weights.slices import Cut, Transfer
from rollout.weights.nccl import PairChannel
from rollout.weights.parts.receiver import PartTransfer


class PairSlices(PairChannel):
    """Receives packed cuts of one trainer rank's pieces, and then sums."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("cpu")

    def slices(self, transfer: PartTransfer) -> Iterator[list[tuple[Cut, torch.Tensor]]]:
        self._device = self.join(transfer.answer, transfer.manifest, transfer.deadline, transfer.line)
        memories = _memories(transfer.plan.buckets, self._device)
        for bucket, memory in self.received(memories, transfer.deadline, transfer.disconnected):
            yield list(zip(bucket, cuts_in(memory, bucket, transfer.manifest), strict=True))

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        sums = torch.empty(count, dtype=torch.int64, device=self._device)
        for _ in self.received([(None, sums.view(torch.uint8))], transfer.deadline, transfer.disconnected):
            pass
        return sums


def cuts_in(memory: torch.Tensor, bucket: Iterable[Cut], manifest: WeightManifest) -> list[torch.Tensor]:
    """Return the elements of each cut in the memory of their bucket, in their shape."""
    found = []
    for cut in bucket:
        part = memory[cut.offset : cut.offset + cut.nbytes]
        found.append(part.view(getattr(torch, manifest.tensors[cut.tensor].dtype)).view(shape_of(cut.box)))
    return found


def _memories(
    buckets: Iterable[tuple[Cut, ...]], device: torch.device
) -> Iterator[tuple[tuple[Cut, ...], torch.Tensor]]:
    for bucket in buckets:
        yield bucket, torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=device)
