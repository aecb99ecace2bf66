"""Plans which tokens of a group's rows are computed once: the first ones, as far as rows have them in common.

Rows of a group in lexicographic order are a family: no earlier row has more in common with a row than the one
just before it. A tree of stretches holds each distinct token once, to any depth: a group's prompt, and the
parts of an agent's history that its branches repeat.

Shapes: n rows of a family. A row's tokens are its inputs: all of a sample's but the last, which has no
successor.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.batch import Batch

KEYS_COST = 1 / 32
"""Cost of a shared stretch for each token behind it, in tokens computed: the token attends to the keys of the
stretch apart from its own, and both results are joined."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Successive tokens that are computed once for all rows that have them."""

    row: int
    """One of these rows."""
    start: int
    """Position of its first token in each of them."""
    stop: int
    """The position after its last one."""
    parent: int
    """Index of the stretch that it follows; -1: it begins its rows."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Stretches that hold the tokens of some rows; there may be several trees in it."""

    stretches: tuple[Stretch, ...]
    """Each after its parent, and with all that follow it next to each other."""
    ends: tuple[int, ...]
    """For each row the last of its stretches; -1 if it has no tokens."""

    @classmethod
    def of(cls, families: Iterable["RowFamily"]) -> "PrefixTree":
        """Lay out families one after the other; their rows are numbered in that order."""
        stretches: list[Stretch] = []
        ends: list[int] = []
        for family in families:
            _lay_out(family, stretches, ends)
        return cls(tuple(stretches), tuple(ends))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each stretch."""
        return [stretch.tokens for stretch in self.stretches]

    @property
    def is_shared(self) -> bool:
        """Whether a stretch follows another."""
        return any(stretch.parent >= 0 for stretch in self.stretches)

    def path(self, stretch: int) -> list[int]:
        """Return the stretches from the start of its rows to a stretch, which is the last."""
        found = []
        while stretch >= 0:
            found.append(stretch)
            stretch = self.stretches[stretch].parent
        return found[::-1]

    def rows_through(self) -> list[list[int]]:
        """Return the rows that have each stretch."""
        found: list[list[int]] = [[] for _ in self.stretches]
        for row, end in enumerate(self.ends):
            for stretch in self.path(end):
                found[stretch].append(row)
        return found


@dataclass(frozen=True, slots=True)
class RowFamily:
    """Rows in lexicographic order that are computed together, as far as they begin alike."""

    rows: tuple[int, ...]
    """[n]: their indices."""
    lengths: tuple[int, ...]
    """[n]: tokens of each."""
    shared: tuple[int, ...]
    """[n]: tokens that each has in common with the row before it, and that are computed once; 0 for the
    first."""

    @property
    def tokens(self) -> int:
        """Tokens that are computed for all of them."""
        return sum(self.lengths) - sum(self.shared)

    def copies(self, window: int) -> int:
        """Return how many tokens before its stretches these see, counted again for each stretch.

        Args:
            window: tokens that each token sees, itself included; 0: all before it.
        """
        nodes = _intervals(self.lengths, self.shared)
        most = window - 1 if window else max(self.lengths, default=0)
        return sum(min(start, most) for _, _, start, stop, _ in nodes if stop > start)

    def cut(self, limit: int, most: int) -> Iterator["RowFamily"]:
        """Yield parts that compute at most `limit` tokens each, for `most` rows; a longer row is alone.

        Each part computes again the tokens that it shares with rows of other parts.
        """
        first, tokens = 0, 0
        for row, (length, shared) in enumerate(zip(self.lengths, self.shared, strict=True)):
            if row > first and (tokens + length - shared > limit or row - first == most):
                yield self.part(range(first, row))
                first, tokens = row, 0
            tokens += length - (shared if row > first else 0)
        yield self.part(range(first, len(self.rows)))

    def part(self, places: Sequence[int]) -> "RowFamily":
        """Return the family of some of its rows, given by ascending places in it."""
        between = (min(self.shared[before + 1 : place + 1]) for before, place in pairwise(places))
        return RowFamily(
            tuple(self.rows[place] for place in places),
            tuple(self.lengths[place] for place in places),
            (0, *between),
        )


def together(lengths: Sequence[int], samples: Sequence[int]) -> list[RowFamily]:
    """Return a family of the rows of each sample, which share no tokens."""
    members: dict[int, list[int]] = defaultdict(list)
    for row, sample in enumerate(samples):
        members[sample].append(row)
    return [
        RowFamily(tuple(one), tuple(lengths[row] for row in one), (0,) * len(one)) for one in members.values()
    ]


def alone(lengths: Sequence[int]) -> list[RowFamily]:
    """Return a family of each row, which shares no tokens."""
    return together(lengths, range(len(lengths)))


def find_families(
    rows: Sequence[NDArray[Any]], groups: Sequence[Hashable], cost: float = KEYS_COST
) -> list[RowFamily]:
    """Return the families of rows, one a group, in the order of their first rows.

    They share what saves more than it costs.

    Args:
        rows: for each an array [tokens, ...] that is equal where the computation of a token is.
        groups: for each row the rows with which it may share tokens have the same.
        cost: as `KEYS_COST`.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    return [_family(indices, [rows[index] for index in indices], cost) for indices in members.values()]


def batch_families(batch: Batch, *, by_experts: bool = False, long: int = 0) -> list[RowFamily]:
    """Return the families of a batch's samples: samples of a group may share tokens.

    Args:
        batch: on the host.
        by_experts: whether tokens with other recorded experts are computed otherwise.
        long: tokens of the longest sample that is computed as short ones are; 0: length makes no difference.
    """
    ids, offsets = batch.tokens.numpy()[:, None].view(np.uint8), batch.offsets.tolist()
    if by_experts and batch.experts is not None:
        experts = batch.experts.flatten(1).numpy().view(np.uint8)
        ids = np.concatenate([ids, experts], axis=1)
    is_long = (batch.lengths > long if long else torch.zeros_like(batch.lengths)).tolist()
    return find_families(
        [ids[first : max(end - 1, first)] for first, end in pairwise(offsets)],
        list(zip(batch.group_index.tolist(), is_long, strict=True)),
    )


def _family(indices: Sequence[int], rows: Sequence[NDArray[Any]], cost: float) -> RowFamily:
    texts = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=texts.__getitem__) if len(rows) > 1 else [0]
    width = max(1, *(row[:1].nbytes for row in rows))
    shared = [0, *(_in_common(texts[a], texts[b]) // width for a, b in pairwise(order))]
    lengths = [len(rows[place]) for place in order]
    kept = _worthwhile(lengths, shared, cost)
    return RowFamily(tuple(indices[place] for place in order), tuple(lengths), kept)


def _in_common(one: bytes, other: bytes) -> int:
    """Return how many bytes at the start are equal."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differ.argmax()) if differ.any() else size


@dataclass(slots=True)
class _Node:
    """Tokens that successive rows have in common, behind its parent's."""

    start: int
    stop: int
    parent: int
    splits: list[int]
    """Rows that have no more than these tokens in common with the row before them."""
    behind: int = 0
    """Tokens that are computed for its rows behind its own."""


def _worthwhile(lengths: Sequence[int], shared: Sequence[int], cost: float) -> tuple[int, ...]:
    """Return `shared` without what costs more than it saves.

    From the ends of the tree to its root, each node is kept if its copies would take more tokens than
    attending to it costs the tokens behind it.
    """
    nodes: list[_Node] = []
    for first, end, start, common, parent in _intervals(lengths, shared):
        if end - first > 1:
            splits = [row for row in range(first + 1, end) if shared[row] == common]
            nodes.append(_Node(start, common, parent, splits))
        elif parent >= 0:
            nodes[parent].behind += common - start
    kept = [0] * len(shared)
    for node in reversed(nodes):
        tokens, outer = node.stop - node.start, nodes[node.parent] if node.parent >= 0 else None
        if len(node.splits) * tokens > cost * node.behind:
            for row in node.splits:
                kept[row] = node.stop
            tokens += node.behind
        else:
            tokens = node.behind + (len(node.splits) + 1) * tokens
            if outer is not None:
                outer.splits += node.splits
        if outer is not None:
            outer.behind += tokens
    return tuple(kept)


def _intervals(lengths: Sequence[int], shared: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (first row, row after the last, start, stop, parent) of each node of a family, then its children.

    A node is what successive rows have in common, or the rest of one row; it may have no tokens. The parent
    is the index of a node of several rows, counted in the order in which these come; -1 at the root.
    """
    inner, stack = 0, [(0, len(lengths), 0, -1)]
    while stack:
        first, end, start, parent = stack.pop()
        if end - first == 1:
            yield first, end, start, lengths[first], parent
            continue
        common = min(shared[first + 1 : end])
        yield first, end, start, common, parent
        edges = [first, *(row for row in range(first + 1, end) if shared[row] == common), end]
        stack += [(a, b, common, inner) for a, b in reversed(list(pairwise(edges)))]
        inner += 1


def _lay_out(family: RowFamily, stretches: list[Stretch], ends: list[int]) -> None:
    """Append a family's stretches and rows."""
    base, last = len(ends), list[int]()
    """`last`: of each node of several rows the stretch that its rows have last."""
    for first, end, start, stop, parent in _intervals(family.lengths, family.shared):
        found = last[parent] if parent >= 0 else -1
        if stop > start:
            stretches.append(Stretch(base + first, start, stop, found))
            found = len(stretches) - 1
        if end - first > 1:
            last.append(found)
        else:
            ends.append(found)
