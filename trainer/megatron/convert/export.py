"""Exports a model's tensors by Hugging Face name: gathered on one rank, or by pieces on all ranks.

Rows on several ranks are published by the rank with the fewest bytes so far, which balances the work over the
data-parallel copies of a model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from protocol.messages import WeightPiece
from protocol.weights.boxes import Box, size_of, whole
from trainer.backends.early_export import EarlyExport, Tensors
from trainer.megatron.convert.reshard import TensorPlan, narrow_rows
from trainer.megatron.convert.rules import Segment
from trainer.megatron.layout import Layout
from trainer.megatron.parallel import Position
from trainer.ranks.collectives import batched_p2p
from trainer.ranks.publication import Publication


@dataclass(frozen=True, slots=True)
class PublishedPiece:
    """Box of a tensor on one rank."""

    tensor: int
    """Index of the tensor's plan."""
    box: Box
    rows: tuple[Segment, ...]
    """Rows of the rank's parameter that form the box, in order."""
    held: Mapping[int, tuple[Segment, ...]]
    """Grid number of each rank with the box -> its rows."""


def joined(plan: TensorPlan, rows: Sequence[Segment], parameter: torch.Tensor) -> torch.Tensor:
    """Return the box formed by rows of a parameter: a view if the rows are contiguous, else a copy."""
    views = _views(plan, rows, parameter)
    found: torch.Tensor = (views[0] if len(views) == 1 else torch.cat(views, plan.dim)).detach()
    return found if rows[0].matrix is None else found.unsqueeze(0)


def _views(plan: TensorPlan, rows: Iterable[Segment], parameter: torch.Tensor) -> list[torch.Tensor]:
    return [narrow_rows(parameter, plan.dim, row.local_start, row.length, row.local_matrix) for row in rows]


class Exporter:
    """Export of a model by one rank."""

    def __init__(
        self, layout: Layout, position: Position, dtype: torch.dtype, get_part: Callable[[str], torch.Tensor]
    ) -> None:
        """Bind to a layout.

        Args:
            layout: layout of the model.
            position: position of this rank.
            dtype: dtype of the parameters.
            get_part: returns this rank's part of a parameter by name.
        """
        self._layout = layout
        self._position = position
        self._dtype = dtype
        self._get_part = get_part
        self._published: tuple[Sequence[TensorPlan], tuple[tuple[PublishedPiece, ...], ...]] = ((), ())
        """Cached plans and each rank's published pieces, whose planning takes milliseconds."""

    def publication(self, plans: Sequence[TensorPlan]) -> Publication:
        """Return the boxes of the planned tensors that each rank publishes; equal on every rank."""
        parts = tuple(
            tuple(WeightPiece(piece.tensor, piece.box) for piece in part) for part in self._parts(plans)
        )
        found = Publication(tuple(plan.name for plan in plans), tuple(plan.shape for plan in plans), parts)
        return found if self._layout.ranks > 1 else found.gathered()

    def pieces(self, plans: Sequence[TensorPlan]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's pieces of the publication. Not a collective."""
        for piece in self._parts(plans)[self._position.rank]:
            plan = plans[piece.tensor]
            yield plan.name, joined(plan, piece.rows, self._get_part(plan.parameter))

    def gathered(
        self, plans: Iterable[TensorPlan], owners: Mapping[str, int] = MappingProxyType({})
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole tensor on its owner, by default rank 0; the other ranks send their parts."""
        for plan in plans:
            owner = owners.get(plan.name, 0)
            if self._position.rank == owner:
                yield plan.name, self._receive(plan)
            else:
                self._send(plan, owner)

    def early_export(
        self, plans: Sequence[TensorPlan], begin: Callable[[Tensors], None] | None, updates: int
    ) -> EarlyExport:
        """Return an export that overlaps the optimizer step; a disabled one if ranks must gather tensors."""
        alone = self._layout.ranks == 1
        return EarlyExport(begin if alone else None, partial(self._receive_when_final, plans), updates)

    @torch.no_grad()
    def _receive_when_final(
        self, plans: Iterable[TensorPlan], early: EarlyExport
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for plan in plans:
            early.await_final(self._get_part(plan.parameter))
            yield plan.name, self._receive(plan)

    def _parts(self, plans: Sequence[TensorPlan]) -> tuple[tuple[PublishedPiece, ...], ...]:
        if self._published[0] is not plans:
            self._published = plans, published_pieces(plans, self._layout)
        return self._published[1]

    def _receive(self, plan: TensorPlan) -> torch.Tensor:
        """Assemble a tensor on this rank from its own pieces and one message from each other holder."""
        dtype = torch.float32 if plan.exact else self._dtype
        tensor = torch.empty(plan.shape, dtype=dtype, device=self._position.device)
        for number in sorted({piece.rank for piece in plan.pieces}):
            pieces = [piece for piece in plan.pieces if piece.rank == number]
            holder = self._layout.holder_of(plan.stage, number)
            if holder == self._position.rank:
                rows = _views(plan, pieces, self._get_part(plan.parameter))
            else:
                lengths = [piece.length for piece in pieces]
                shape = [*plan.shape] if pieces[0].matrix is None else [*plan.shape[1:]]
                shape[plan.dim] = sum(lengths)
                message = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                batched_p2p(dist.irecv, message, holder)
                rows = list(message.split(lengths, plan.dim))
            for piece, part in zip(pieces, rows, strict=True):
                narrow_rows(tensor, plan.dim, piece.start, piece.length, piece.matrix).copy_(part)
        return tensor

    def _send(self, plan: TensorPlan, owner: int) -> None:
        place = self._position.place
        number = self._layout.number_of(place, expert=plan.expert)
        pieces = [piece for piece in plan.pieces if piece.rank == number]
        if pieces and self._position.rank == self._layout.holder_of(plan.stage, number):
            views = _views(plan, pieces, self._get_part(plan.parameter))
            batched_p2p(dist.isend, torch.cat(views, plan.dim).contiguous(), owner)


def published_pieces(plans: Sequence[TensorPlan], layout: Layout) -> tuple[tuple[PublishedPiece, ...], ...]:
    """Return the pieces that each global rank publishes; every element is published exactly once."""
    parts: list[list[PublishedPiece]] = [[] for _ in range(layout.ranks)]
    elements = [0] * layout.ranks
    for index, plan in enumerate(plans):
        groups: dict[tuple[int | None, tuple[int, ...]], list[Segment]] = {}
        for piece in plan.pieces:
            numbers = (piece.rank, *(copy.rank for copy in piece.copies))
            groups.setdefault((piece.matrix, numbers), []).append(piece)
        for (_, numbers), pieces in groups.items():
            rank = min(_holders(plan, numbers, layout), key=lambda rank: (elements[rank], rank))
            number = layout.number_of(layout.place_of(rank), expert=plan.expert)
            runs = {
                holder: adjacent(
                    next(p for p in (piece, *piece.copies) if p.rank == holder) for piece in pieces
                )
                for holder in numbers
            }
            for run, rows in enumerate(runs[number]):
                box = box_of_rows(plan, rows)
                elements[rank] += size_of(box)
                held = {holder: found[run] for holder, found in runs.items()}
                parts[rank].append(PublishedPiece(index, box, rows, held))
    return tuple(tuple(part) for part in parts)


def _holders(plan: TensorPlan, numbers: Sequence[int], layout: Layout) -> list[int]:
    """Return the global ranks whose grid number is in `numbers`."""
    first = plan.stage * layout.stage_ranks
    return [
        rank
        for rank in range(first, first + layout.stage_ranks)
        if layout.number_of(layout.place_of(rank), expert=plan.expert) in numbers
    ]


def adjacent(pieces: Iterable[Segment]) -> list[tuple[Segment, ...]]:
    """Group pieces that are contiguous in the tensor."""
    runs: list[list[Segment]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.matrix, last.start + last.length) == (piece.matrix, piece.start):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [tuple(run) for run in runs]


def box_of_rows(plan: TensorPlan, rows: Sequence[Segment]) -> Box:
    """Return the box of a tensor formed by contiguous rows."""
    first, last = rows[0], rows[-1]
    box = list(whole(plan.shape))
    dim = plan.dim
    if first.matrix is not None:
        box[0] = (first.matrix, first.matrix + 1)
        dim += 1
    box[dim] = (first.start, last.start + last.length)
    return tuple(box)
