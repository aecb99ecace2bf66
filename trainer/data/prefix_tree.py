"""Plans which prefixes of a group's rows are computed once.

The rows of a group in lexicographic order are a family. In this order, no earlier row has a longer common
prefix with a row than the row just before it. A tree of stretches stores each distinct token once, at any
depth: a group's prompt, and the parts of an agent's history that its branches repeat.

Shapes: n rows of a family. A row's tokens are its inputs: all tokens of the sample except the last.
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
"""Cost of a shared stretch per token after it, in computed tokens. Each such token attends separately to the
keys of the stretch and to its own, and both results are merged."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens that are computed once for all rows that contain them."""

    row: int
    """One of the rows with these tokens."""
    start: int
    """Position of the first token in each row."""
    stop: int
    """Position after the last token."""
    parent: int
    """Index of the preceding stretch; -1 at the beginning of a row."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Forest of stretches with the tokens of some rows."""

    stretches: tuple[Stretch, ...]
    """Stretches in depth-first order: each after its parent, and each subtree contiguous."""
    ends: tuple[int, ...]
    """Last stretch of each row; -1 for a row without tokens."""

    @classmethod
    def of(cls, families: Iterable["RowFamily"]) -> "PrefixTree":
        """Lay out families in order. Rows are numbered in the same order."""
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
        """Whether any stretch has a parent."""
        return any(stretch.parent >= 0 for stretch in self.stretches)

    def path(self, stretch: int) -> list[int]:
        """Return the path from the root to `stretch`, inclusive."""
        found = []
        while stretch >= 0:
            found.append(stretch)
            stretch = self.stretches[stretch].parent
        return found[::-1]

    def rows_through(self) -> list[list[int]]:
        """Return the rows of each stretch."""
        found: list[list[int]] = [[] for _ in self.stretches]
        for row, end in enumerate(self.ends):
            for stretch in self.path(end):
                found[stretch].append(row)
        return found


@dataclass(frozen=True, slots=True)
class RowFamily:
    """Rows in lexicographic order whose common prefixes are computed once."""

    rows: tuple[int, ...]
    """[n]: indices of the rows."""
    lengths: tuple[int, ...]
    """[n]: tokens of each row."""
    shared: tuple[int, ...]
    """[n]: length of the prefix that each row shares with the previous row and that is computed once; 0 for
    the first row."""

    @property
    def tokens(self) -> int:
        """Number of computed tokens of the family."""
        return sum(self.lengths) - sum(self.shared)

    def copies(self, window: int) -> int:
        """Return the number of earlier tokens that the stretches attend to, counted once per stretch.

        Args:
            window: attention window in tokens, including the token itself; 0: unlimited.
        """
        nodes = _intervals(self.lengths, self.shared)
        most = window - 1 if window else max(self.lengths, default=0)
        return sum(min(start, most) for _, _, start, stop, _ in nodes if stop > start)

    def cut(self, limit: int, max_rows: int) -> Iterator["RowFamily"]:
        """Yield parts of at most `limit` computed tokens and `max_rows` rows. A longer row is its own part.

        Each part recomputes the tokens that it shares with rows of other parts.
        """
        first, tokens = 0, 0
        for row, (length, shared) in enumerate(zip(self.lengths, self.shared, strict=True)):
            if row > first and (tokens + length - shared > limit or row - first == max_rows):
                yield self.part(range(first, row))
                first, tokens = row, 0
            tokens += length - (shared if row > first else 0)
        yield self.part(range(first, len(self.rows)))

    def part(self, places: Sequence[int]) -> "RowFamily":
        """Return the family of some rows, given as ascending positions within this family."""
        between = (min(self.shared[before + 1 : place + 1]) for before, place in pairwise(places))
        return RowFamily(
            tuple(self.rows[place] for place in places),
            tuple(self.lengths[place] for place in places),
            (0, *between),
        )


def families_by_sample(lengths: Sequence[int], samples: Sequence[int]) -> list[RowFamily]:
    """Return one family per sample, with the sample's rows and no shared tokens."""
    members: dict[int, list[int]] = defaultdict(list)
    for row, sample in enumerate(samples):
        members[sample].append(row)
    return [
        RowFamily(tuple(one), tuple(lengths[row] for row in one), (0,) * len(one)) for one in members.values()
    ]


def single_row_families(lengths: Sequence[int]) -> list[RowFamily]:
    """Return one family per row."""
    return families_by_sample(lengths, range(len(lengths)))


def find_families(
    rows: Sequence[NDArray[Any]], groups: Sequence[Hashable], cost: float = KEYS_COST
) -> list[RowFamily]:
    """Return the families of rows, one per group, in the order of their first rows.

    A family shares a prefix only if the saving exceeds the cost.

    Args:
        rows: for each row, an array [tokens, ...]; equal entries mean that the tokens' computation is equal.
        groups: group key of each row; only rows with equal keys may share tokens.
        cost: relative cost of shared tokens, see `KEYS_COST`.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    return [_family(indices, [rows[index] for index in indices], cost) for indices in members.values()]


def batch_families(batch: Batch, *, by_experts: bool = False, long: int = 0) -> list[RowFamily]:
    """Return the families of a batch. Only samples of the same group may share tokens.

    Args:
        batch: batch on the host.
        by_experts: whether tokens are shared only if their recorded experts are equal.
        long: samples with more tokens share tokens only with each other; 0: no distinction.
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
    shared = [0, *(_common_prefix_bytes(texts[a], texts[b]) // width for a, b in pairwise(order))]
    lengths = [len(rows[place]) for place in order]
    kept = _worthwhile(lengths, shared, cost)
    return RowFamily(tuple(indices[place] for place in order), tuple(lengths), kept)


def _common_prefix_bytes(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix in bytes."""
    size = min(len(left), len(right))
    differ = np.frombuffer(left, np.uint8, size) != np.frombuffer(right, np.uint8, size)
    return int(differ.argmax()) if differ.any() else size


@dataclass(slots=True)
class _Node:
    """Common tokens of consecutive rows, after the tokens of the parent node."""

    start: int
    stop: int
    parent: int
    splits: list[int]
    """Rows whose common prefix with the previous row ends at this node."""
    behind: int = 0
    """Number of tokens computed below this node."""


def _worthwhile(lengths: Sequence[int], shared: Sequence[int], cost: float) -> tuple[int, ...]:
    """Return `shared` without the prefixes that cost more than they save.

    Nodes are visited from the leaves to the root. A node is kept if copying its tokens would cost more than
    the attention of all tokens below to it.
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
    """Yield (first row, end row, start, stop, parent) of each node of a family in depth-first order.

    A node is a common prefix of consecutive rows, or the rest of one row. A node may be empty. The parent is
    the index among the nodes with several rows, in the order in which they are yielded; -1 at the root.
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
    """Append the stretches and row ends of a family."""
    base, last = len(ends), list[int]()
    """`last`: the deepest stretch of each node with several rows."""
    for first, end, start, stop, parent in _intervals(family.lengths, family.shared):
        found = last[parent] if parent >= 0 else -1
        if stop > start:
            stretches.append(Stretch(base + first, start, stop, found))
            found = len(stretches) - 1
        if end - first > 1:
            last.append(found)
        else:
            ends.append(found)
