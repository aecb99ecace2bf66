"""Plans which rank publishes which box of which Hugging Face tensor: pure, plain data.

Rows that several ranks have are published by the rank with the fewest bytes so far, so that the data-parallel
copies of a model share the work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.weights.boxes import Box, size_of, whole
from trainer.megatron.convert.reshard import Piece, TensorPlan
from trainer.megatron.layout import Layout


@dataclass(frozen=True, slots=True)
class PublishedPiece:
    """A box of a tensor on one rank."""

    tensor: int
    """Index into the plans."""
    box: Box
    rows: tuple[Piece, ...]
    """Rows of the rank's parameter that make up the box, in order."""


def published_pieces(plans: Sequence[TensorPlan], layout: Layout) -> tuple[tuple[PublishedPiece, ...], ...]:
    """Return what each rank publishes, by global rank; together every element once."""
    parts: list[list[PublishedPiece]] = [[] for _ in range(layout.ranks)]
    elements = [0] * layout.ranks
    for index, plan in enumerate(plans):
        groups: dict[tuple[int | None, tuple[int, ...]], list[Piece]] = {}
        for piece in plan.pieces:
            numbers = (piece.rank, *(copy.rank for copy in piece.copies))
            groups.setdefault((piece.matrix, numbers), []).append(piece)
        for (_, numbers), pieces in groups.items():
            rank = min(_holders(plan, numbers, layout), key=lambda rank: (elements[rank], rank))
            number = layout.number_of(layout.place_of(rank), expert=plan.expert)
            held = [next(p for p in (piece, *piece.copies) if p.rank == number) for piece in pieces]
            for rows in _adjacent(held):
                box = _box(plan, rows)
                elements[rank] += size_of(box)
                parts[rank].append(PublishedPiece(index, box, rows))
    return tuple(tuple(part) for part in parts)


def _holders(plan: TensorPlan, numbers: Sequence[int], layout: Layout) -> list[int]:
    """Return the global ranks that have one of these numbers in the grid of the parameter."""
    first = plan.stage * layout.stage_ranks
    return [
        rank
        for rank in range(first, first + layout.stage_ranks)
        if layout.number_of(layout.place_of(rank), expert=plan.expert) in numbers
    ]


def _adjacent(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """Group pieces that follow each other in the tensor."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.matrix, last.start + last.length) == (piece.matrix, piece.start):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [tuple(run) for run in runs]


def _box(plan: TensorPlan, rows: Sequence[Piece]) -> Box:
    """Return the box of a tensor that rows which follow each other are."""
    first, last = rows[0], rows[-1]
    box = list(whole(plan.shape))
    dim = plan.dim
    if first.matrix is not None:
        box[0] = (first.matrix, first.matrix + 1)
        dim += 1
    box[dim] = (first.start, last.start + last.length)
    return tuple(box)
