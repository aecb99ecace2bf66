"""Says which keys the pieces of stretches on a context rank see, and where they lie among the gathered ones.

A stretch is a sequence, or what it does not share with others, see `PrefixTree`: then it also sees the keys
of the stretches before it. Those are copied in front of a piece's own, or the piece attends to them apart.

Shapes: C context ranks; T tokens on each, with padding; P pieces on this rank; K keys in front of them and
their own, counting one again for each piece that has a copy; n queries of S sequences that attend apart to m
keys.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from trainer.data.context_division import Division, SequencePiece
from trainer.data.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows, at least one, each of which is there once."""

    index: torch.Tensor
    """int64 [n]."""
    first: int | None
    """The first of them, if they are neighbours in their order."""

    @classmethod
    def at(cls, index: torch.Tensor) -> "Rows":
        """Return the rows with these indices, int64 [n], on the host."""
        first = int(index[0])
        run = torch.arange(first, first + len(index))
        return cls(index, first if torch.equal(index, run) else None)

    def to(self, device: torch.device) -> "Rows":
        """Return them with the indices on a device."""
        return replace(self, index=to_device(self.index, device))

    def take(self, array: torch.Tensor) -> torch.Tensor:
        """Return these rows of an array [T, ...], a view if they are neighbours."""
        if self.first is None:
            return array.index_select(0, self.index)
        return array.narrow(0, self.first, len(self.index))

    def put(self, array: torch.Tensor, values: torch.Tensor) -> None:
        """Replace these rows of an array by `values` [n, ...]."""
        if self.first is None:
            array.index_copy_(0, self.index, values)
        else:
            self.take(array).copy_(values)

    def add(self, array: torch.Tensor, values: torch.Tensor) -> None:
        """Add `values` [n, ...] to these rows of an array."""
        if self.first is None:
            array.index_add_(0, self.index, values.to(array.dtype))
        else:
            self.take(array).add_(values)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class KeyUse:
    """Use that layers make of the keys before a piece."""

    query_cost: float | None = None
    """Cost of attending to keys apart for a query, in copies of a key: pieces do what is cheaper. None: they
    never attend apart."""
    window: int = 0
    """Tokens that each one attends to, itself included: others are not copied; 0: all before it."""


COPIED = KeyUse()


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys before some pieces, to all of which every query of these pieces attends, in a call of its own."""

    queries: Rows
    """The n queries, among the T tokens."""
    query_offsets: torch.Tensor
    """int32 [S + 1]: where each sequence of them begins, and n."""
    tokens: Rows
    """The m keys, among the C T gathered tokens."""
    key_offsets: torch.Tensor
    """int32 [S + 1]: where the keys of each sequence begin, and m."""
    sizes: tuple[tuple[int, int], ...]
    """Queries and keys of each of the S sequences."""

    def to(self, device: torch.device) -> "SharedKeys":
        """Return it with its arrays on a device."""
        return replace(
            self,
            queries=self.queries.to(device),
            query_offsets=to_device(self.query_offsets, device),
            tokens=self.tokens.to(device),
            key_offsets=to_device(self.key_offsets, device),
        )


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys of each piece: copies of some before it, and its own up to each query."""

    tokens: torch.Tensor | None
    """int64 [K]: for each key its place among the C T gathered tokens, which lie rank by rank. None: the keys
    are the T tokens."""
    offsets: torch.Tensor
    """int32 [P + 1]: where the keys of each piece begin, and K."""
    longest: int
    """Keys of the piece with the most."""
    queries: torch.Tensor
    """int64 [T]: where among the K the key of each query's own token is."""
    starts: torch.Tensor
    """int64 [P], on the host: position of each piece's first token."""
    whole: torch.Tensor
    """int64 [P], on the host: tokens of a whole sequence that each piece is of."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """For tokens that as many pieces see: int64 [n], which of the gathered they are, and int64 [n, pieces],
    which of the K keys."""
    shared: tuple[SharedKeys, ...] = ()
    """Keys that pieces attend to apart: a call for each number of others that are before them."""

    def to(self, device: torch.device) -> "VisibleKeys":
        """Return it with what kernels need on a device."""
        return replace(
            self,
            tokens=None if self.tokens is None else to_device(self.tokens, device),
            offsets=to_device(self.offsets, device),
            queries=to_device(self.queries, device),
            copies=tuple((to_device(a, device), to_device(b, device)) for a, b in self.copies),
            shared=tuple(one.to(device) for one in self.shared),
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


def visible_keys(division: Division, rank: int, tree: PrefixTree, use: KeyUse = COPIED) -> VisibleKeys:
    """Return the keys that a rank's pieces see, on the host; `division` is of the tree's stretches."""
    first, places = _gathered_places(division)
    own, pieces = division.pieces[rank], pieces_with_padding(division, rank)
    before = _spans_before(own, tree)
    groups = {} if use.query_cost is None else _apart(own, before, use.query_cost)
    apart = {span for spans in groups.values() for span in spans}
    seen = [[*(span for span in spans if span not in apart), own[n]] for n, spans in enumerate(before)]
    if use.window:
        seen = [_last(spans, own[n].tokens + use.window - 1) for n, spans in enumerate(seen)]
    padding = [piece.tokens for piece in pieces[len(own) :]]
    behind = (rank + 1) * division.size
    counts = torch.tensor([piece.tokens for piece in pieces])
    sizes = torch.tensor([sum(span.tokens for span in spans) for spans in seen] + padding)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    tokens = torch.cat(
        [
            _places_of((span for spans in seen for span in spans), first, places),
            torch.arange(behind - sum(padding), behind),
        ]
    )
    is_copied = len(division.pieces) > 1 or len(tokens) > division.size
    return VisibleKeys(
        tokens=tokens if is_copied else None,
        offsets=offsets.int(),
        longest=int(sizes.max()),
        queries=ranges(offsets[1:] - counts, counts),
        starts=torch.tensor([tree.stretches[p.sequence].start + p.start for p in own] + [0] * len(padding)),
        whole=torch.tensor([_whole_length(tree, piece.sequence) for piece in own] + padding),
        copies=_copies(tokens) if is_copied else (),
        shared=_calls(own, groups, first, places),
    )


def ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return `counts` (int64 [n]) successive integers from each of `starts` (int64 [n]), all in one."""
    shift = starts - counts.cumsum(0) + counts
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


def _spans_before(own: Sequence[SequencePiece], tree: PrefixTree) -> list[list[SequencePiece]]:
    """Return for each piece the spans of tokens before it, from the first of its sequence on.

    A span ends where a piece of this rank begins or ends, so a piece sees all of a span or none.
    """
    edges: dict[int, set[int]] = defaultdict(set)
    for piece in own:
        edges[piece.sequence] |= {piece.start, piece.stop}
    found = []
    for piece in own:
        *path, last = tree.path(piece.sequence)
        ends = [*((stretch, tree.stretches[stretch].tokens) for stretch in path), (last, piece.start)]
        spans: list[SequencePiece] = []
        for stretch, stop in ends:
            cuts = sorted({0, stop} | {edge for edge in edges[stretch] if edge < stop})
            spans += (SequencePiece(stretch, a, b) for a, b in pairwise(cuts))
        found.append(spans)
    return found


def _apart(
    own: Sequence[SequencePiece], before: Sequence[Sequence[SequencePiece]], query_cost: float
) -> dict[tuple[int, ...], list[SequencePiece]]:
    """Return spans that pieces attend to apart, in order, by the pieces that are behind them."""
    behind: dict[SequencePiece, list[int]] = defaultdict(list)
    for number, spans in enumerate(before):
        for span in spans:
            behind[span].append(number)
    groups: dict[tuple[int, ...], list[SequencePiece]] = defaultdict(list)
    for span, numbers in behind.items():
        groups[tuple(numbers)].append(span)
    return {
        numbers: spans
        for numbers, spans in groups.items()
        if len(numbers) * sum(span.tokens for span in spans)
        > query_cost * sum(own[number].tokens for number in numbers)
    }


def _calls(
    own: Sequence[SequencePiece],
    groups: dict[tuple[int, ...], list[SequencePiece]],
    first: dict[int, int],
    places: torch.Tensor,
) -> tuple[SharedKeys, ...]:
    """Return the calls of `_apart`: the n-th has the n-th spans before each piece, from its root on."""
    begins = [0, *accumulate(piece.tokens for piece in own)]
    level, calls = [0] * len(own), list[list[tuple[int, ...]]]()
    for numbers in sorted(groups, key=len, reverse=True):  # of two sets, one holds the other, or none of it
        if (depth := level[numbers[0]]) == len(calls):
            calls.append([])
        calls[depth].append(numbers)
        for number in numbers:
            level[number] += 1
    found = []
    for call in calls:
        starts = torch.tensor([begins[number] for numbers in call for number in numbers])
        counts = torch.tensor([own[number].tokens for numbers in call for number in numbers])
        spans = [groups[numbers] for numbers in call]
        queries = [sum(own[number].tokens for number in numbers) for numbers in call]
        keys = [sum(span.tokens for span in one) for one in spans]
        found.append(
            SharedKeys(
                queries=Rows.at(ranges(starts, counts)),
                query_offsets=torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
                tokens=Rows.at(_places_of((span for one in spans for span in one), first, places)),
                key_offsets=torch.tensor([0, *accumulate(keys)], dtype=torch.int32),
                sizes=tuple(zip(queries, keys, strict=True)),
            )
        )
    return tuple(found)


def _last(spans: Sequence[SequencePiece], tokens: int) -> list[SequencePiece]:
    """Return the end of spans, with so many tokens at most."""
    kept: list[SequencePiece] = []
    for span in reversed(spans):
        if tokens <= 0:
            break
        kept.append(replace(span, start=max(span.start, span.stop - tokens)))
        tokens -= span.tokens
    return kept[::-1]


def _places_of(spans: Iterable[SequencePiece], first: dict[int, int], places: torch.Tensor) -> torch.Tensor:
    """Return the places of spans among the gathered tokens, int64."""
    table = [(first[span.sequence] + span.start, span.tokens) for span in spans]
    starts, counts = torch.tensor(table, dtype=torch.int64).view(-1, 2).unbind(1)
    return places[ranges(starts, counts)]


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
