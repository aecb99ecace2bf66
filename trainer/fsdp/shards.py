"""Says which box of which tensor of a checkpoint each rank's shards hold, and cuts them out.

torch shards a parameter along its first dimension: W ranks have ceil(n / W) of its n rows each, the last ones
fewer or none. A tensor of the checkpoint is a strided view of one parameter (`checkpoint_views`), such as one
expert of all that are joined in it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from protocol.device.checkpoint_views import checkpoint_views
from protocol.messages import WeightPiece
from protocol.weights.boxes import whole
from trainer.ranks.publication import Publication
from trainer.reference.shards import local_tensor


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor of the checkpoint, as a view of a parameter; offset and strides are in elements."""

    name: str
    """In the checkpoint."""
    parameter: str
    """In the model."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    by_rows: bool
    """Whether it is a range of the parameter's rows; else it can lie in one shard only as a whole."""

    def within(self, memory: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return the view of memory that begins at element `first` of the parameter."""
        return memory.as_strided(self.shape, self.strides, self.offset - first + memory.storage_offset())


def tensor_views(model: Any, parameters: Mapping[str, torch.Tensor]) -> tuple[TensorView, ...]:
    """Return the tensors of a model's checkpoint, in the order of its parameters.

    Raises:
        SettingsError: a tensor of the checkpoint is no view of a parameter.
    """
    blank = {name: torch.empty(tensor.shape, device="meta") for name, tensor in parameters.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in blank.items()}
    order = {name: place for place, name in enumerate(blank)}
    views = []
    for name, view in checkpoint_views(model, blank).items():
        owner = owners[view.untyped_storage()._cdata]
        shape, strides = tuple(view.shape), view.stride()
        row = math.prod(blank[owner].shape[1:])
        is_range = view.ndim == blank[owner].ndim and strides == blank[owner].stride()
        by_rows = is_range and shape[1:] == blank[owner].shape[1:] and view.storage_offset() % row == 0
        views.append(TensorView(name, owner, shape, strides, int(view.storage_offset()), by_rows))
    return tuple(sorted(views, key=lambda view: order[view.parameter]))


def plain_views(parameters: Mapping[str, torch.Tensor]) -> tuple[TensorView, ...]:
    """Return parameters that are tensors of a checkpoint as they are."""
    blank = {name: torch.empty(tensor.shape, device="meta") for name, tensor in parameters.items()}
    return tuple(
        TensorView(name, name, tuple(tensor.shape), tensor.stride(), 0, by_rows=True)
        for name, tensor in blank.items()
    )


def shard_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row of a rank's shard, and the row after its last one."""
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The pieces of the checkpoint's tensors that each rank publishes."""

    views: tuple[TensorView, ...]
    parts: tuple[tuple[WeightPiece, ...], ...]

    @classmethod
    def make(
        cls, views: Sequence[TensorView], parameters: Mapping[str, torch.Tensor], ranks: int
    ) -> "ShardPlan | None":
        """Return the plan for shards on `ranks` ranks; None if a tensor lies in several, but not by rows."""
        parts: list[list[WeightPiece]] = [[] for _ in range(ranks)]
        for number, view in enumerate(views):
            pieces = list(_pieces(number, view, parameters[view.parameter], ranks))
            if not pieces:
                return None
            for rank, piece in pieces:
                parts[rank].append(piece)
        return cls(tuple(views), tuple(map(tuple, parts)))

    def publication(self) -> Publication:
        """Return what the ranks publish."""
        return Publication(
            tuple(view.name for view in self.views), tuple(view.shape for view in self.views), self.parts
        )

    def cut(self, parameters: Mapping[str, torch.Tensor], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a rank's pieces with the names of their tensors, as views of its shards."""
        for piece in self.parts[rank]:
            view = self.views[piece.tensor]
            tensor = parameters[view.parameter]
            if not isinstance(tensor, DTensor):
                yield view.name, view.within(tensor.detach())
                continue
            row = math.prod(tensor.shape[1:])
            first, _ = shard_rows(tensor.shape[0], rank, len(self.parts))
            memory = local_tensor(tensor.detach())
            if not view.by_rows:
                yield view.name, view.within(memory, first * row)
                continue
            start, stop = piece.box[0]
            yield view.name, memory.narrow(0, view.offset // row + start - first, stop - start)


def _pieces(
    number: int, view: TensorView, parameter: torch.Tensor, ranks: int
) -> Iterator[tuple[int, WeightPiece]]:
    """Yield (rank, piece) of a tensor; nothing if no division into boxes is known."""
    if not isinstance(parameter, DTensor):
        yield 0, WeightPiece(number, whole(view.shape))
        return
    row = math.prod(parameter.shape[1:])
    steps = zip(view.shape, view.strides, strict=True)
    last = view.offset + sum((size - 1) * stride for size, stride in steps)
    for rank in range(ranks):
        first, stop = shard_rows(parameter.shape[0], rank, ranks)
        if view.by_rows:
            begin = view.offset // row
            own = max(first, begin) - begin, min(stop, begin + view.shape[0]) - begin
            if own[0] < own[1]:
                yield rank, WeightPiece(number, (own, *whole(view.shape)[1:]))
        elif first * row <= view.offset and last < stop * row:
            yield rank, WeightPiece(number, whole(view.shape))
