"""Says which keys the pieces of sequences on a context rank see, and where they lie among the gathered ones.

Shapes: C context ranks; T tokens on each, with padding; P pieces on this rank; K keys that they see together,
counting one again for each piece that sees it.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from trainer.data.context_division import Division, SequencePiece


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys of each piece: its sequence from the first token to the piece's last one."""

    tokens: torch.Tensor
    """int64 [K]: for each key its place among the C T gathered tokens, which lie rank by rank."""
    offsets: torch.Tensor
    """int32 [P + 1]: where the keys of each piece begin, and K."""
    longest: int
    """Keys of the piece with the most."""
    queries: torch.Tensor
    """int64 [T]: where among the K the key of each query's own token is."""
    whole: torch.Tensor
    """int64 [P], on the host: tokens of the whole sequence that each piece is of."""


def pieces_with_padding(division: Division, rank: int) -> list[SequencePiece]:
    """Return the pieces of a rank; its padding, if it has any, is a sequence of its own behind them."""
    own = [*division.pieces[rank]]
    padding = division.size - sum(piece.tokens for piece in own)
    return [*own, SequencePiece(-1, 0, padding)] if padding else own


def visible_keys(division: Division, rank: int) -> VisibleKeys:
    """Return the keys that a rank's pieces see, on the host."""
    first, places = _gathered_places(division)
    own = pieces_with_padding(division, rank)
    lengths = _lengths(division)
    starts = torch.tensor([first[piece.sequence] for piece in division.pieces[rank]], dtype=torch.int64)
    ends = torch.tensor([piece.stop for piece in own])
    counts = torch.tensor([piece.tokens for piece in own])
    padding = int(counts.sum()) - sum(piece.tokens for piece in division.pieces[rank])
    behind = (rank + 1) * division.size
    offsets = torch.nn.functional.pad(ends.cumsum(0), (1, 0))
    return VisibleKeys(
        tokens=torch.cat(
            [places[ranges(starts, ends[: len(starts)])], torch.arange(behind - padding, behind)]
        ),
        offsets=offsets.int(),
        longest=int(ends.max()),
        queries=ranges(offsets[1:] - counts, counts),
        whole=torch.tensor([lengths.get(piece.sequence, piece.tokens) for piece in own]),
    )


def ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return `counts` (int64 [n]) successive integers from each of `starts` (int64 [n]), all in one."""
    shift = starts - counts.cumsum(0) + counts
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


def _gathered_places(division: Division) -> tuple[dict[int, int], torch.Tensor]:
    """Return where each sequence begins in a list of all tokens, and each token's place when gathered."""
    rows = sorted(
        (piece.sequence, piece.start, rank * division.size + end - piece.tokens, piece.tokens)
        for rank, own in enumerate(division.pieces)
        for piece, end in zip(own, accumulate(piece.tokens for piece in own), strict=True)
    )
    first: dict[int, int] = {}
    for (sequence, _, _, tokens), end in zip(rows, accumulate(row[3] for row in rows), strict=True):
        first.setdefault(sequence, end - tokens)
    table = torch.tensor([row[2:] for row in rows], dtype=torch.int64).view(-1, 2)
    return first, ranges(table[:, 0], table[:, 1])


def _lengths(division: Division) -> dict[int, int]:
    """Return the tokens of each sequence."""
    lengths: dict[int, int] = {}
    for piece in (piece for own in division.pieces for piece in own):
        lengths[piece.sequence] = max(piece.stop, lengths.get(piece.sequence, 0))
    return lengths
