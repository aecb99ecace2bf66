"""The ranks of a trainer in one process: a sender for each, and a version of tensors cut into pieces."""

import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from protocol.messages import WeightDraft, WeightManifest, WeightPiece
from protocol.weights.boxes import Box, whole
from rollout.staging.placement import ExpectedTensor, Slice
from rollout.staging.staging import Staging, contiguous_stride, dtype_name
from trainer.config import WeightConfig
from trainer.ranks.publication import Publication
from trainer.weights.part_layout import PartReport, blank_manifest
from trainer.weights.served.sender import PartSender

Tensors = Mapping[str, torch.Tensor]
DEADLINE_S = 60.0


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def halves(shape: Sequence[int], dim: int, count: int) -> list[Box]:
    """Equal parts along a dimension."""
    step = shape[dim] // count
    return [(*whole(shape)[:dim], (i * step, (i + 1) * step), *whole(shape)[dim + 1 :]) for i in range(count)]


def tensor_ranks(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> list[dict[str, list[Box]]]:
    """What tensor ranks of an engine hold: rows of a matrix or columns, by its number; vectors whole."""
    found: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
    for number, (name, shape) in enumerate(shapes.items()):
        dim = number % 2
        split = len(shape) == 2 and shape[dim] >= ranks
        for rank in range(ranks):
            cut = -(-shape[dim] // ranks) if split else 0
            part = (rank * cut, min(shape[dim], (rank + 1) * cut)) if split else (0, 0)
            box = (*whole(shape)[:dim], part, *whole(shape)[dim + 1 :]) if split else whole(shape)
            found[rank][name] = [box]
    return found


class TrainerRanks:
    """Ranks that publish together, as `PartSender.publish` has them do over a process group."""

    def __init__(
        self,
        boxes: Mapping[str, Sequence[tuple[int, Box]]],
        shapes: Mapping[str, tuple[int, ...]],
        ranks: int,
        transport: str = "nccl",
        dtype: str = "float32",
        delta: bool = False,
    ) -> None:
        """Make the senders.

        `boxes`: name -> (rank, box) of each piece. `transport`: of host memory, or of the GPU as "ipc:N".
        """
        self._names = tuple(boxes)
        pieces: list[list[WeightPiece]] = [[] for _ in range(ranks)]
        for number, found in enumerate(boxes.values()):
            for rank, box in found:
                pieces[rank].append(WeightPiece(number, box))
        self.publication = Publication(
            self._names, tuple(shapes[name] for name in boxes), tuple(map(tuple, pieces))
        )
        transport, _, gpu = transport.partition(":")
        backend = "" if gpu else "gloo"
        config = WeightConfig(
            transport=transport, backend=backend, bucket_mb=1, timeout_s=DEADLINE_S, delta=delta
        )
        blank = blank_manifest(self.publication, dtype, config.bucket_mb << 20, transport)
        self.senders = [PartSender(config, rank, blank) for rank in range(ranks)]

    def pieces(self, rank: int, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in self.publication.parts[rank]:
            name = self._names[piece.tensor]
            yield name, tensors[name][index(piece.box)]

    def draft(self, epoch: str, version: int) -> WeightDraft | None:
        first, *_ = [sender.draft(epoch, version) for sender in self.senders]
        return first

    def fill(self, epoch: str, version: int, tensors: Tensors) -> list[PartReport]:
        return [
            sender.fill(epoch, version, self.pieces(rank, tensors))
            for rank, sender in enumerate(self.senders)
        ]

    def publish(self, epoch: str, version: int, tensors: Tensors) -> WeightManifest:
        manifest = self.senders[0].collect(self.fill(epoch, version, tensors), base_model="")
        for sender in self.senders:
            sender.serve_or_discard(True)
        return manifest

    def close(self) -> None:
        threads = [threading.Thread(target=sender.close) for sender in self.senders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextmanager
def trainer_ranks(
    boxes: Mapping[str, Sequence[tuple[int, Box]]],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: int,
    transport: str = "nccl",
    dtype: str = "float32",
    delta: bool = False,
) -> Iterator[TrainerRanks]:
    made = TrainerRanks(boxes, shapes, ranks, transport, dtype, delta)
    try:
        yield made
    finally:
        made.close()


class EngineRank:
    """A staging copy of boxes of tensors, of some in float32 whatever the others are."""

    def __init__(
        self,
        boxes: Mapping[str, Sequence[Box]],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        wider: Container[str] = (),
    ) -> None:
        kinds = {name: torch.float32 if name in wider else dtype for name in boxes}
        self.copy = {
            (name, box): torch.full([stop - start for start, stop in box], torch.nan, dtype=kinds[name])
            for name, found in boxes.items()
            for box in found
        }
        self.staging = Staging(
            {
                name: ExpectedTensor(
                    dtype_name(kinds[name]),
                    shapes[name],
                    tuple(self._slice(name, box, shapes[name]) for box in found),
                )
                for name, found in boxes.items()
            }
        )

    def _slice(self, name: str, box: Box, shape: Sequence[int]) -> Slice:
        strides = contiguous_stride(shape)
        offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        target = self.copy[name, box]
        return Slice(offset, tuple(target.shape), strides, target)

    def fetch(self, manifest: WeightManifest) -> int:
        return self.staging.fetch(manifest, DEADLINE_S)

    def holds(self, tensors: Tensors) -> bool:
        return all(
            torch.equal(copy, tensors[name][index(box)].to(copy.dtype))
            for (name, box), copy in self.copy.items()
        )
