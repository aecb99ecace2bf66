"""Computes which keys the pieces on a context rank see, and their positions among the gathered keys.

A stretch is a sequence, or the part of a sequence that it does not share with others, see `PrefixTree`. A
stretch also sees the keys of the stretches before it. These keys are copied in front of a piece's own keys,
or the piece attends to them separately.

Shapes: C context ranks; T tokens per rank, with padding; P pieces on this rank; K keys of the pieces, with
copies counted once per piece; n queries of S sequences that attend separately to m keys.
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
    """One or more distinct rows of an array."""

    index: torch.Tensor
    """int64 [n]."""
    first: int | None
    """First index if the rows are contiguous and ascending, else None."""

    @classmethod
    def at(cls, index: torch.Tensor) -> "Rows":
        """Return the rows with the indices int64 [n], on the host."""
        first = int(index[0])
        run = torch.arange(first, first + len(index))
        return cls(index, first if torch.equal(index, run) else None)

    def to(self, device: torch.device) -> "Rows":
        """Return the rows with the indices on a device."""
        return replace(self, index=to_device(self.index, device))

    def take(self, array: torch.Tensor) -> torch.Tensor:
        """Return these rows of an array [T, ...], as a view if the rows are contiguous."""
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
    """Copy a host tensor to a device without synchronizing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class KeyUse:
    """Access of a group of layers to the keys before a piece."""

    query_cost: float | None = None
    """Cost per query of attending to keys separately, in copies of a key; pieces use the cheaper method.
    None: keys are always copied."""
    window: int = 0
    """Attention window in tokens, including the token itself: keys outside are not copied; 0: unlimited."""


COPIED = KeyUse()


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys before some pieces. Every query of these pieces attends to all of the keys, in a separate call."""

    queries: Rows
    """Indices of the n queries among the T tokens."""
    query_offsets: torch.Tensor
    """int32 [S + 1]: start of each sequence's queries, and n."""
    tokens: Rows
    """Indices of the m keys among the C T gathered tokens."""
    key_offsets: torch.Tensor
    """int32 [S + 1]: start of each sequence's keys, and m."""
    sizes: tuple[tuple[int, int], ...]
    """Number of queries and keys of each of the S sequences."""

    def to(self, device: torch.device) -> "SharedKeys":
        """Return the keys with all arrays on a device."""
        return replace(
            self,
            queries=self.queries.to(device),
            query_offsets=to_device(self.query_offsets, device),
            tokens=self.tokens.to(device),
            key_offsets=to_device(self.key_offsets, device),
        )


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Keys of each piece: copied keys before the piece, and the piece's own keys, causally masked."""

    tokens: torch.Tensor | None
    """int64 [K]: index of each key among the C T gathered tokens, ordered by rank. None: the keys are the T
    tokens."""
    offsets: torch.Tensor
    """int32 [P + 1]: start of each piece's keys, and K."""
    longest: int
    """Number of keys of the piece with the most keys."""
    queries: torch.Tensor
    """int64 [T]: index of each query's own key among the K keys."""
    starts: torch.Tensor
    """int64 [P], on the host: position of each piece's first token."""
    whole: torch.Tensor
    """int64 [P], on the host: length of the whole sequence that contains each piece."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """One entry per number of copies: int64 [n], gathered tokens with that many copies, and int64 [n,
    copies], indices of the copies among the K keys."""
    shared: tuple[SharedKeys, ...] = ()
    """Keys that pieces attend to separately, one call per depth of shared prefixes."""

    def to(self, device: torch.device) -> "VisibleKeys":
        """Return the keys with the arrays that kernels read on a device."""
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
    """Tokens that a rank computes, without padding: T computed tokens for N tokens of samples.

    Indices refer to the concatenated tokens of all samples.
    """

    tokens: torch.Tensor
    """int64 [T]: index of each computed token, in one of its samples."""
    row_tokens: torch.Tensor
    """int64 [N]: index of each token in every sample that contains it."""
    places: torch.Tensor
    """int64 [N]: index of the corresponding computed token."""

    @classmethod
    def of(cls, offsets: torch.Tensor, tree: PrefixTree, division: Division, rank: int) -> "ComputedTokens":
        """List the tokens in the order in which the rank computes them.

        Args:
            offsets: int64 [n + 1]: start of each sample.
            tree: prefix tree of the samples.
            division: split of the tree's stretches over context ranks.
            rank: index of the context rank.
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
        """Return, for each of `count` sample tokens, the index of its predicting token among T; 0 if none."""
        rows = torch.zeros(count, dtype=torch.int64)
        rows[self.row_tokens + 1] = self.places
        return rows


def pieces_with_padding(division: Division, rank: int) -> list[SequencePiece]:
    """Return the pieces of a rank. Padding, if any, is a sequence of its own at the end."""
    own = [*division.pieces[rank]]
    padding = division.size - sum(piece.tokens for piece in own)
    return [*own, SequencePiece(-1, 0, padding)] if padding else own


def visible_keys(division: Division, rank: int, tree: PrefixTree, use: KeyUse = COPIED) -> VisibleKeys:
    """Return the keys that a rank's pieces see, on the host. `division` splits the tree's stretches."""
    first, places = _gathered_places(division)
    own, pieces = division.pieces[rank], pieces_with_padding(division, rank)
    before = _spans_before(own, tree)
    groups = {} if use.query_cost is None else _separate_spans(own, before, use.query_cost)
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
        shared=_separate_calls(own, groups, first, places),
    )


def ranges(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the concatenated ranges of `counts` (int64 [n]) integers from `starts` (int64 [n])."""
    shift = starts - counts.cumsum(0) + counts
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


def _spans_before(own: Sequence[SequencePiece], tree: PrefixTree) -> list[list[SequencePiece]]:
    """Return the spans of tokens before each piece, from the start of its sequence.

    Spans are cut at the edges of this rank's pieces, so a piece sees a whole span or none of it.
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


def _separate_spans(
    own: Sequence[SequencePiece], before: Sequence[Sequence[SequencePiece]], query_cost: float
) -> dict[tuple[int, ...], list[SequencePiece]]:
    """Return the spans that pieces attend to separately, in order, keyed by the pieces after them."""
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


def _separate_calls(
    own: Sequence[SequencePiece],
    groups: dict[tuple[int, ...], list[SequencePiece]],
    first: dict[int, int],
    places: torch.Tensor,
) -> tuple[SharedKeys, ...]:
    """Return the calls: call n has the n-th group of `_separate_spans` before each piece, from the root."""
    begins = [0, *accumulate(piece.tokens for piece in own)]
    level, calls = [0] * len(own), list[list[tuple[int, ...]]]()
    for numbers in sorted(groups, key=len, reverse=True):  # two sets are nested or disjoint
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
    """Return the last spans, cut to at most `tokens` tokens."""
    kept: list[SequencePiece] = []
    for span in reversed(spans):
        if tokens <= 0:
            break
        kept.append(replace(span, start=max(span.start, span.stop - tokens)))
        tokens -= span.tokens
    return kept[::-1]


def _places_of(spans: Iterable[SequencePiece], first: dict[int, int], places: torch.Tensor) -> torch.Tensor:
    """Return the indices of spans among the gathered tokens, int64."""
    table = [(first[span.sequence] + span.start, span.tokens) for span in spans]
    starts, counts = torch.tensor(table, dtype=torch.int64).view(-1, 2).unbind(1)
    return places[ranges(starts, counts)]


def _copies(tokens: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return `VisibleKeys.copies` for `tokens`."""
    order = tokens.argsort(stable=True)
    distinct, counts = tokens[order].unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    found = []
    for count in counts.unique().tolist():
        chosen = counts == count
        found.append((distinct[chosen], order[first[chosen][:, None] + torch.arange(count)]))
    return tuple(found)


def _gathered_places(division: Division) -> tuple[dict[int, int], torch.Tensor]:
    """Return each stretch's start in a list of all tokens, and each token's index after gathering."""
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
    """Return the number of tokens of the sequence that lists the stretch."""
    end = tree.ends[tree.stretches[stretch].row]
    return tree.stretches[end].stop
