"""Splits the tokens of a micro-batch over context-parallel ranks.

Shapes: S sequences of a micro-batch, C context ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

LARGE_SHARE = 8
"""A sequence is cut over all ranks if it is longer than 1 / `LARGE_SHARE` of a rank's tokens."""


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """Tokens `start` to `stop` (exclusive) of a sequence, contiguous on a rank."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Division:
    """Split of a micro-batch's tokens over the context ranks."""

    pieces: tuple[tuple[SequencePiece, ...], ...]
    """Pieces of each rank, in the rank's token order. No piece is empty."""
    size: int
    """Tokens per rank; tokens after the last piece are padding."""

    @classmethod
    def of(cls, lengths: Sequence[int], ranks: int, multiple: int = 1) -> "Division":
        """Split sequences into equal token counts per rank, with about equal attention cost.

        The attention cost of a token is proportional to the number of tokens before it, so the end of a
        sequence is expensive. A sequence that is long compared with a rank's share is cut into 2 C pieces;
        rank r gets pieces r and 2 C - 1 - r, whose total cost is the same for every r. The other sequences
        are assigned whole, by length, in zigzag order. At most C - 1 of them are cut, at the ends of ranks'
        shares. The padding is therefore less than C times `multiple` tokens, for any number of samples. The
        usual padding of each sequence to a multiple of 2 C would add C tokens per sample. Cutting only the
        packed stream in zigzag order would need no padding, but would assign the end of a long sequence to
        one rank.

        Args:
            lengths: tokens of each of the S sequences; may be 0.
            ranks: C. With one rank, sequences stay whole and in order.
            multiple: `size` is a positive multiple of this number.
        """
        least = -(-sum(lengths) // ranks)
        size = max(-(-least // multiple), 1) * multiple
        if ranks == 1:
            whole = tuple(SequencePiece(number, 0, length) for number, length in enumerate(lengths) if length)
            return cls((whole,), size)
        order = sorted((s for s, length in enumerate(lengths) if length), key=lambda s: (-lengths[s], s))
        large = [s for s in order if lengths[s] * LARGE_SHARE > least]
        pieces = _cut_over_all(large, lengths, ranks)
        dealt = _deal(order[len(large) :], ranks)
        _fill(pieces, (SequencePiece(s, 0, lengths[s]) for s in dealt), least)
        return cls(tuple(map(tuple, pieces)), size)

    @property
    def padding(self) -> int:
        """Padding tokens on all ranks."""
        return self.size * len(self.pieces) - sum(piece.tokens for own in self.pieces for piece in own)


def _cut_over_all(large: Iterable[int], lengths: Sequence[int], ranks: int) -> list[list[SequencePiece]]:
    """Return two pieces of each sequence for every rank: all first pieces, then all second pieces.

    Remainders are assigned to ranks round-robin, so the ranks' token counts differ by at most one.
    """
    first: list[list[SequencePiece]] = [[] for _ in range(ranks)]
    second: list[list[SequencePiece]] = [[] for _ in range(ranks)]
    turn = 0
    for sequence in large:
        each, over = divmod(lengths[sequence], ranks)
        tokens = [each + ((rank - turn) % ranks < over) for rank in range(ranks)]
        turn += over
        sizes = [count // 2 for count in tokens] + [count - count // 2 for count in reversed(tokens)]
        edges = [0, *accumulate(sizes)]
        for rank in range(ranks):
            for own, number in ((first, rank), (second, 2 * ranks - 1 - rank)):
                if edges[number] < edges[number + 1]:
                    own[rank].append(SequencePiece(sequence, edges[number], edges[number + 1]))
    return [before + behind for before, behind in zip(first, second, strict=True)]


def _deal(sequences: Iterable[int], ranks: int) -> Iterator[int]:
    """Assign sequences, longest first, in zigzag order; yield rank 0's sequences, then rank 1's, ..."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for number, sequence in enumerate(sequences):
        place = number % (2 * ranks)
        hands[min(place, 2 * ranks - 1 - place)].append(sequence)
    for hand in hands:
        yield from hand


def _fill(pieces: list[list[SequencePiece]], sequences: Iterable[SequencePiece], size: int) -> None:
    """Append sequences to ranks in rank order, cutting a sequence where a rank reaches `size` tokens."""
    rank, used = 0, [sum(piece.tokens for piece in own) for own in pieces]
    for sequence in sequences:
        start = 0
        while start < sequence.stop:
            while used[rank] == size:
                rank += 1
            stop = min(sequence.stop, start + size - used[rank])
            pieces[rank].append(SequencePiece(sequence.sequence, start, stop))
            used[rank] += stop - start
            start = stop
