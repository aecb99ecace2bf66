"""Computes the box of each checkpoint tensor that each rank's shards contain, and views the boxes.

A tensor-parallel rank has a part of a parameter (`trainer.reference.shards`), which torch shards along the
first dimension: each of W data-parallel ranks has ceil(n / W) of its n rows, the last ranks fewer or none. A
checkpoint tensor is a strided view of one parameter (`checkpoint_views`), such as one expert of a merged
parameter. The same view of a parameter's part is a box of the tensor.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from protocol.device.checkpoint_views import checkpoint_views
from protocol.messages import WeightPiece
from protocol.weights.boxes import Box, whole
from trainer.ranks.publication import Publication
from trainer.reference.shards import DATA, TENSOR, Cut, local_tensor, part_shape, tensor_cut


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor-parallel rank's part of a checkpoint tensor, as a view of the rank's part of a parameter.

    Offset and strides are in elements.
    """

    name: str
    """Name in the checkpoint."""
    parameter: str
    """Name in the model."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    by_rows: bool
    """Whether the view is a range of the parameter's rows; otherwise it must lie whole in one shard."""
    whole: tuple[int, ...]
    """Shape of the whole tensor, over all ranks."""
    blocks: int = 1
    """Number of equal blocks that the ranks shard separately, such as gates and inputs of experts."""

    @property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks shard the tensor; otherwise each rank has the whole tensor."""
        return self.shape != self.whole

    def in_blocks(self, box: Box) -> Iterator[Box]:
        """Split a box of the rank's part at the block boundaries."""
        if self.blocks == 1:
            yield box
            return
        sizes = enumerate(zip(self.shape, self.whole, strict=True))
        dim = next(dim for dim, (size, total) in sizes if size != total)
        block = self.shape[dim] // self.blocks
        for first in range(0, self.shape[dim], block):
            own = max(box[dim][0], first), min(box[dim][1], first + block)
            if own[0] < own[1]:
                yield (*box[:dim], own, *box[dim + 1 :])

    def moved(self, box: Box, rank: int) -> Box:
        """Return the box in the whole tensor of a box in the part of `rank`, within one block."""
        moved = []
        for size, total, (a, b) in zip(self.shape, self.whole, box, strict=True):
            block, gap = size // self.blocks, (total - size) // self.blocks
            step = a // block * gap + rank * block if size != total else 0
            moved.append((a + step, b + step))
        return tuple(moved)

    def within(self, memory: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return the view of memory that begins at element `first` of the parameter."""
        return memory.as_strided(self.shape, self.strides, self.offset - first + memory.storage_offset())


def tensor_views(
    model: Any, parameters: Mapping[str, torch.Tensor], mesh: DeviceMesh | None = None
) -> tuple[TensorView, ...]:
    """Return the tensors of a model's checkpoint, in parameter order; with a mesh, a rank's parts.

    Raises:
        SettingsError: a tensor of the checkpoint is not a view of a parameter.
    """
    meta, tensor_ranks = functools.partial(torch.empty, device="meta"), mesh[TENSOR].size() if mesh else 1
    blank = {name: meta(part_shape(tensor, tensor_ranks)) for name, tensor in parameters.items()}
    wholes = checkpoint_views(model, {name: meta(tensor.shape) for name, tensor in parameters.items()})
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in blank.items()}
    order = {name: place for place, name in enumerate(blank)}
    views = []
    for name, view in checkpoint_views(model, blank).items():
        owner = owners[view.untyped_storage()._cdata]
        shape, strides = tuple(view.shape), view.stride()
        row = math.prod(blank[owner].shape[1:])
        is_range = view.ndim == blank[owner].ndim and strides == blank[owner].stride()
        by_rows = is_range and shape[1:] == blank[owner].shape[1:] and view.storage_offset() % row == 0
        of = tuple(wholes[name].shape)
        blocks = _blocks(tensor_cut(parameters[owner]), tuple(blank[owner].shape), shape, of)
        offset = int(view.storage_offset())
        views.append(TensorView(name, owner, shape, strides, offset, by_rows, of, blocks))
    return tuple(sorted(views, key=lambda view: order[view.parameter]))


def _blocks(cut: Cut | None, part: tuple[int, ...], shape: tuple[int, ...], of: tuple[int, ...]) -> int:
    """Return the number of blocks of a parameter in a checkpoint tensor: all blocks or one.

    Args:
        cut: sharding of the parameter.
        part: shape of a tensor-parallel rank's part of the parameter.
        shape: shape of the rank's part of the tensor.
        of: shape of the whole tensor.
    """
    divided = [size for size, total in zip(shape, of, strict=True) if size != total]
    return cut[1] if cut and part[cut[0]] in divided else 1


def plain_views(
    parameters: Mapping[str, torch.Tensor], mesh: DeviceMesh | None = None
) -> tuple[TensorView, ...]:
    """Return views of parameters that are checkpoint tensors as they are; with a mesh, a rank's parts."""
    tensor_ranks, views = mesh[TENSOR].size() if mesh else 1, []
    for name, tensor in parameters.items():
        part, of = torch.empty(part_shape(tensor, tensor_ranks), device="meta"), tuple(tensor.shape)
        shape, blocks = tuple(part.shape), (tensor_cut(tensor) or (0, 1))[1]
        views.append(TensorView(name, name, shape, part.stride(), 0, True, of, blocks if mesh else 1))
    return tuple(views)


def shard_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first and the end row of a rank's shard, end exclusive."""
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Pieces of the checkpoint's tensors on each rank."""

    views: tuple[TensorView, ...]
    parts: tuple[tuple[WeightPiece, ...], ...]
    """By data-parallel rank; boxes refer to the part of a tensor-parallel rank."""
    tensor_ranks: int

    @classmethod
    def make(
        cls, views: Sequence[TensorView], parameters: Mapping[str, torch.Tensor], mesh: DeviceMesh
    ) -> "ShardPlan | None":
        """Return the plan for a mesh; None if a tensor spans several shards, but not by rows."""
        ranks, tensor_ranks = mesh[DATA].size(), mesh[TENSOR].size()
        parts: list[list[WeightPiece]] = [[] for _ in range(ranks)]
        for number, view in enumerate(views):
            parameter = parameters[view.parameter]
            shape = part_shape(parameter, tensor_ranks) if isinstance(parameter, DTensor) else None
            pieces = list(_pieces(number, view, shape, ranks))
            if not pieces:
                return None
            for rank, piece in pieces:
                parts[rank] += (WeightPiece(number, box) for box in view.in_blocks(piece.box))
        return cls(tuple(views), tuple(map(tuple, parts)), tensor_ranks)

    def publication(self) -> Publication:
        """Return the pieces that the ranks publish, in order of tensor-parallel ranks within a replica."""
        parts = (self.published(rank) for rank in range(len(self.parts) * self.tensor_ranks))
        pieces = tuple(tuple(piece for piece, _ in part) for part in parts)
        return Publication(
            tuple(view.name for view in self.views), tuple(view.whole for view in self.views), pieces
        )

    def published(self, rank: int) -> Iterator[tuple[WeightPiece, WeightPiece]]:
        """Yield the published pieces of a rank as (piece of the whole tensor, piece of the rank's part).

        The first tensor-parallel rank publishes unsharded tensors.
        """
        data, tensor = divmod(rank, self.tensor_ranks)
        for piece in self.parts[data]:
            view = self.views[piece.tensor]
            if view.is_divided or tensor == 0:
                yield WeightPiece(piece.tensor, view.moved(piece.box, tensor)), piece

    def cut(
        self, parameters: Mapping[str, torch.Tensor], rank: int, pieces: Iterable[WeightPiece]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (tensor name, view of the shard) for pieces of a data-parallel rank."""
        for piece in pieces:
            view = self.views[piece.tensor]
            tensor = parameters[view.parameter]
            if not isinstance(tensor, DTensor):
                yield view.name, view.within(tensor.detach())
                continue
            shape = part_shape(tensor, self.tensor_ranks)
            row = math.prod(shape[1:])
            first, _ = shard_rows(shape[0], rank, len(self.parts))
            memory = local_tensor(tensor.detach())
            box = piece.box
            if view.by_rows:
                begin = view.offset // row - first
                box = ((begin + box[0][0], begin + box[0][1]), *box[1:])
            else:
                memory = view.within(memory, first * row)
            yield view.name, memory[tuple(slice(*edges) for edges in box)]


def _pieces(
    number: int, view: TensorView, shape: tuple[int, ...] | None, ranks: int
) -> Iterator[tuple[int, WeightPiece]]:
    """Yield (rank, piece) of a tensor; empty if its shards are not boxes.

    `shape` is the shape of the parameter's part; None: the parameter is not sharded.
    """
    if shape is None:
        yield 0, WeightPiece(number, whole(view.shape))
        return
    row = math.prod(shape[1:])
    steps = zip(view.shape, view.strides, strict=True)
    last = view.offset + sum((size - 1) * stride for size, stride in steps)
    for rank in range(ranks):
        first, stop = shard_rows(shape[0], rank, ranks)
        if view.by_rows:
            begin = view.offset // row
            own = max(first, begin) - begin, min(stop, begin + view.shape[0]) - begin
            if own[0] < own[1]:
                yield rank, WeightPiece(number, (own, *whole(view.shape)[1:]))
        elif first * row <= view.offset and last < stop * row:
            yield rank, WeightPiece(number, whole(view.shape))
