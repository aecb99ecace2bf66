"""Packs families of rows, which share tokens, into micro-batches."""

from collections.abc import Iterator, Sequence
from math import ceil

from trainer.data.packing import pack
from trainer.data.prefix_tree import RowFamily


def pack_families(
    families: Sequence[RowFamily], budget: int, *, most: int, key_share: float = 0.0
) -> list[list[RowFamily]]:
    """Return the families, or parts of them, of each micro-batch; one without any if there are none.

    A family that has more tokens than a micro-batch is cut.

    Args:
        families: rows with the tokens that they share.
        budget: tokens of a micro-batch, at most, unless one row has more.
        most: rows of a micro-batch, at most.
        key_share: memory of a key and value, in tokens. Stretches hold copies of those that they share.
    """
    parts = [part for family in families for part in _fitting(family, budget, most, key_share)]
    sizes = [_size(part, key_share) for part in parts]
    found = pack(sizes, budget, most, [len(part.rows) for part in parts])
    return [[parts[index] for index in one] for one in found] or [[]]


def _fitting(family: RowFamily, budget: int, most: int, key_share: float) -> Iterator[RowFamily]:
    """Yield parts of a family that each fit a micro-batch, or are a single row."""
    for part in family.cut(budget, most):
        rows = len(part.rows)
        if rows == 1 or _size(part, key_share) <= budget:
            yield part
            continue
        for half in (range(rows // 2), range(rows // 2, rows)):
            yield from _fitting(part.part(half), budget, most, key_share)


def _size(family: RowFamily, key_share: float) -> int:
    """Return the tokens that take as much memory as a family."""
    return family.tokens + ceil(key_share * (family.keys - family.tokens))
