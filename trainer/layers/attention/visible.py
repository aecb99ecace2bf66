"""Says which keys the pieces of stretches on a context rank see, and where they lie among the gathered ones.

A stretch is a sequence, or what it does not share with others, see `PrefixTree`: then it also sees the keys
of the stretches before it.

Shapes: C context ranks; T tokens on each, with padding; P pieces on this rank; K keys that they see together,
counting one again for each piece that sees it.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from trainer.data.context_division import Division, SequencePiece
from trainer.data.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys of each piece: its sequences from the first token to the piece's last one."""

    tokens: torch.Tensor
    """int64 [K]: for each key its place among the C T gathered tokens, which lie rank by rank."""
    offsets: torch.Tensor
    """int32 [P + 1]: where the keys of each piece begin, and K."""
    longest: int
    """Keys of the piece with the most."""
    queries: torch.Tensor
    """int64 [T]: where among the K the key of each query's own token is."""
    whole: torch.Tensor
    """int64 [P], on the host: tokens of a whole sequence that each piece is of."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """For tokens that as many pieces see: int64 [n], which of the gathered they are, and int64 [n, pieces],
    which of the K keys."""

    def to(self, device: torch.device) -> "VisibleKeys":
        """Return it with what kernels need on a device."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            offsets=to_device(self.offsets, device),
            queries=to_device(self.queries, device),
            copies=tuple((to_device(a, device), to_device(b, device)) for a, b in self.copies),
        )


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens of some samples that a rank computes, without its padding: T of them, for N tokens of samples.

    Indices are into the tokens of all samples, one after the other.
    """

    tokens: torch.Tensor
    """int64 [T]: each as a token of one sample that has it."""
    row_tokens: torch.Tensor
    """int64 [N]: as a token of every sample that has it."""
    places: torch.Tensor
    """int64 [N]: which of the T that is."""

    @classmethod
    def of(cls, offsets: torch.Tensor, tree: PrefixTree, division: Division, rank: int) -> "ComputedTokens":
        """List them in the order in which the rank computes them.

        Args:
            offsets: int64 [n + 1]: where each sample begins.
            tree: holds the samples.
            division: of its stretches.
            rank: among the context ranks.
        """
        through, table, first = tree.rows_through(), list[tuple[int, int, int, int]](), 0
        for piece in division.pieces[rank]:
            start = tree.stretches[piece.sequence].start + piece.start
            table += [(row, start, first, piece.tokens) for row in through[piece.sequence]]
            first += piece.tokens
        rows, starts, firsts, counts = torch.tensor(table, dtype=torch.int64).view(-1, 4).unbind(1)
        row_tokens, places = ranges(offsets[rows] + starts, counts), ranges(firsts, counts)
        tokens = torch.empty(first, dtype=torch.int64)
        tokens[places] = row_tokens
        return cls(tokens, row_tokens, places)

    def predictors(self, count: int) -> torch.Tensor:
        """Return for each of `count` tokens of samples which of the T predicts it; 0 where none does."""
        rows = torch.zeros(count, dtype=torch.int64)
        rows[self.row_tokens + 1] = self.places
        return rows


def pieces_with_padding(division: Division, rank: int) -> list[SequencePiece]:
    """Return the pieces of a rank; its padding, if it has any, is a sequence of its own behind them."""
    own = [*division.pieces[rank]]
    padding = division.size - sum(piece.tokens for piece in own)
    return [*own, SequencePiece(-1, 0, padding)] if padding else own


def visible_keys(division: Division, rank: int, tree: PrefixTree) -> VisibleKeys:
    """Return the keys that a rank's pieces see, on the host; `division` is of the tree's stretches."""
    first, places = _gathered_places(division)
    own, pieces = division.pieces[rank], pieces_with_padding(division, rank)
    spans = []
    for piece in own:
        *before, _ = tree.path(piece.sequence)
        spans += [(first[stretch], tree.stretches[stretch].tokens) for stretch in before]
        spans.append((first[piece.sequence], piece.stop))
    starts, sizes = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
    whole = [_whole_length(tree, piece.sequence) for piece in own]
    ends = [tree.stretches[piece.sequence].start + piece.stop for piece in own]
    padding = [piece.tokens for piece in pieces[len(own) :]]
    behind = (rank + 1) * division.size
    counts = torch.tensor([piece.tokens for piece in pieces])
    seen = torch.tensor(ends + padding)
    offsets = torch.nn.functional.pad(seen.cumsum(0), (1, 0))
    tokens = torch.cat([places[ranges(starts, sizes)], torch.arange(behind - sum(padding), behind)])
    return VisibleKeys(
        tokens=tokens,
        offsets=offsets.int(),
        longest=int(seen.max()),
        queries=ranges(offsets[1:] - counts, counts),
        whole=torch.tensor(whole + padding),
        copies=_copies(tokens),
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return `counts` (int64 [n]) successive integers from each of `starts` (int64 [n]), all in one."""
    shift = starts - counts.cumsum(0) + counts
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


def _copies(tokens: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return `VisibleKeys.copies` of its tokens."""
    order = tokens.argsort(stable=True)
    distinct, counts = tokens[order].unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    found = []
    for count in counts.unique().tolist():
        chosen = counts == count
        found.append((distinct[chosen], order[first[chosen][:, None] + torch.arange(count)]))
    return tuple(found)


def _gathered_places(division: Division) -> tuple[dict[int, int], torch.Tensor]:
    """Return where each stretch begins in a list of all tokens, and each token's place when gathered."""
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


def _whole_length(tree: PrefixTree, stretch: int) -> int:
    """Return the tokens of the sequence that a stretch is listed for."""
    end = tree.ends[tree.stretches[stretch].row]
    return tree.stretches[end].stop
