"""Packs families of rows, which share tokens, into micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from trainer.data.packing import pack
from trainer.data.prefix_tree import RowFamily

Size = Callable[[RowFamily], int]
"""Returns the tokens that take as much memory as a family."""


def pack_families(
    families: Sequence[RowFamily], budget: int, *, most: int, size: Size = attrgetter("tokens")
) -> list[list[RowFamily]]:
    """Return the families, or parts of them, of each micro-batch; one without any if there are none.

    A family that is larger than a micro-batch is cut.

    Args:
        families: rows with the tokens that they share.
        budget: tokens of a micro-batch, at most, unless one row has more.
        most: rows of a micro-batch, at most.
        size: of a family.
    """
    parts = [part for family in families for part in _fitting(family, budget, most, size)]
    found = pack([size(part) for part in parts], budget, most, [len(part.rows) for part in parts])
    return [[parts[index] for index in one] for one in found] or [[]]


def _fitting(family: RowFamily, budget: int, most: int, size: Size) -> Iterator[RowFamily]:
    """Yield parts of a family that each fit a micro-batch, or are a single row."""
    for part in family.cut(budget, most):
        rows = len(part.rows)
        if rows == 1 or size(part) <= budget:
            yield part
            continue
        for half in (range(rows // 2), range(rows // 2, rows)):
            yield from _fitting(part.part(half), budget, most, size)
