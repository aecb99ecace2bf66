"""Reads slices in the memory of a trainer rank of this host; sender: `trainer/weights/parts/handles.py`.

`location` is "HOST:PORT/cuda", or "HOST:PORT/cpu" where the trainer has no GPU and its pieces are in host
memory. Memory of the engine's own GPU, and host memory, is read in place. Of memory of another GPU, which
need not be visible to this process, the cuts are copied by the copy engines, a few buckets ahead of the one
that is read.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch

from protocol.device.bucket_handles import HOST
from protocol.device.shared_tensors import gpu_of
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.boxes import relative, shape_of
from protocol.weights.slices import Cut, PiecePlace, Transfer, piece_places
from rollout.weights.ipc import IpcChannel
from rollout.weights.parts.pairs import cut_in
from rollout.weights.parts.receiver import PartTransfer
from rollout.weights.sender_connection import parse_address
from rollout.weights.verification import AHEAD

DEVICES = ("cpu", "cuda")
"""Devices on which a rank's pieces may be."""


class HandleSlices(IpcChannel):
    """Maps the buckets of one trainer rank's pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("cpu")

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        address, _, device = manifest.location.partition("/")
        if device not in DEVICES:
            raise WeightError(
                f"location {manifest.location!r} is not HOST:PORT/DEVICE with {' or '.join(DEVICES)}"
            )
        if device == "cuda" and not torch.cuda.is_available():
            raise WeightError(
                f"version {manifest.version}: transport ipc shares GPU memory, and this engine has no GPU; "
                "use shm"
            )
        return parse_address(address, manifest.location)

    def slices(self, transfer: PartTransfer) -> Iterator[tuple[Cut, torch.Tensor]]:
        manifest, answer = transfer.manifest, transfer.answer
        sizes, places = piece_places(manifest, transfer.part, int(answer["bucket_bytes"]))
        mapped = self.mapped(answer, sizes, manifest)
        on_gpu = answer["gpu"] != HOST
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

        def source(cut: Cut) -> torch.Tensor:
            return _source(transfer, cut, places[cut.piece], mapped)

        if on_gpu and answer["gpu"] != gpu_of(self._device):
            yield from _from_peer(transfer, source)
            return
        for bucket in transfer.plan.buckets:
            for cut in bucket:
                yield cut, source(cut)

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        transfer.line.send({"sums": count})
        data = bytearray(transfer.line.raw(8 * count))
        return torch.frombuffer(data, dtype=torch.int64).to(self._device)


def _source(transfer: PartTransfer, cut: Cut, place: PiecePlace, mapped: list[torch.Tensor]) -> torch.Tensor:
    """Return the elements of a cut in the memory of its trainer rank."""
    manifest = transfer.manifest
    box = manifest.parts[transfer.part].pieces[cut.piece].box
    raw = mapped[place.bucket][place.offset : place.offset + place.nbytes]
    piece = raw.view(getattr(torch, manifest.tensors[cut.tensor].dtype)).view(shape_of(box))
    return piece[relative(cut.box, box)]


def _from_peer(
    transfer: PartTransfer, source: Callable[[Cut], torch.Tensor]
) -> Iterator[tuple[Cut, torch.Tensor]]:
    """Yield cuts of another GPU, copied to memory of ours, a few buckets ahead."""
    reading, copying = torch.cuda.current_stream(), torch.cuda.Stream()
    queued: deque[tuple[tuple[Cut, ...], list[torch.Tensor], torch.cuda.Event]] = deque()

    def first() -> Iterator[tuple[Cut, torch.Tensor]]:
        bucket, copies, event = queued.popleft()
        reading.wait_event(event)
        yield from zip(bucket, copies, strict=True)

    for bucket in transfer.plan.buckets:
        memory = torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=reading.device)
        copies = [cut_in(memory, cut, transfer.manifest.tensors[cut.tensor]) for cut in bucket]
        copying.wait_stream(reading)  # reused memory may still be read
        with torch.cuda.stream(copying):
            for cut, copy in zip(bucket, copies, strict=True):
                copy.copy_(source(cut), non_blocking=True)
            queued.append((bucket, copies, copying.record_event()))
        if len(queued) == AHEAD:
            yield from first()
    while queued:
        yield from first()
