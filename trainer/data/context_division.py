"""Divides the tokens of a micro-batch between context-parallel ranks.

Shapes: S sequences of a micro-batch, C context ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

LARGE_SHARE = 8
"""A sequence is cut over all ranks if it has more than one part in so many of a rank's tokens."""


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """Tokens of a sequence, from `start` until before `stop`, that are neighbours on a rank."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a micro-batch's tokens among the context ranks."""

    pieces: tuple[tuple[SequencePiece, ...], ...]
    """For each rank, in the order in which it has them; none is empty."""
    size: int
    """Tokens of each rank; those behind its pieces are padding."""

    @classmethod
    def of(cls, lengths: Sequence[int], ranks: int, multiple: int = 1) -> "Division":
        """Divide sequences so that ranks have as many tokens each, and attention costs them about the same.

        A causal token costs as much as it has tokens before it, so the end of a sequence is expensive. A
        sequence that is large for a rank's share is cut into 2 C pieces; rank r has the pieces r and 2 C - 1
        - r: their costs add up to the same for every r. The others are dealt out whole, by length, to and
        fro; where shares of equal size end, one of them is cut, C - 1 at most. Lengths need not be equal for
        that, so the padding is less than C times `multiple` tokens, for any number of samples. Padding each
        sequence to a multiple of 2 C, as is usual, would take C of padding a sample; cutting only the packed
        stream to and fro would take none, but give the end of a long sequence to one rank.

        Args:
            lengths: tokens of each of the S sequences; 0 is one without tokens.
            ranks: C. With one rank it has the sequences as they are.
            multiple: divides `size`, which is at least as large.
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
        """Tokens that are no sequence's, on all ranks."""
        return self.size * len(self.pieces) - sum(piece.tokens for own in self.pieces for piece in own)


def _cut_over_all(large: Iterable[int], lengths: Sequence[int], ranks: int) -> list[list[SequencePiece]]:
    """Return two pieces of each sequence for every rank: all first ones, then all second ones.

    The remainder of a length goes to ranks in turn, so their tokens differ by one at most.
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
    """Deal out sequences, longest first, to and fro; yield rank 0's, then rank 1's, ..."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for number, sequence in enumerate(sequences):
        place = number % (2 * ranks)
        hands[min(place, 2 * ranks - 1 - place)].append(sequence)
    for hand in hands:
        yield from hand


def _fill(pieces: list[list[SequencePiece]], sequences: Iterable[SequencePiece], size: int) -> None:
    """Give whole sequences to ranks in their order, and cut one where a rank has `size` tokens."""
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
