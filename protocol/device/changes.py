"""Codes the changed elements of two versions, and writes them over the older one, on any device.

Changed elements are coded in ascending order: the number of unchanged elements before each, in an unsigned
integer of one width, and its new bits. A gap that the width does not hold is divided by elements that are
written again, unchanged. The width is the one with the fewest bytes. Where changes would take more bytes than
the elements, all of these come instead.
"""

from typing import NamedTuple

import numpy as np
import torch

from protocol.weights.deltas import WHOLE, WIDTHS, coded_bytes

GAPS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Width of a gap -> dtype of that size; read as unsigned."""


class Changes(NamedTuple):
    """Coded changes of elements."""

    width: int
    """Bytes of a gap, or `WHOLE`."""
    elements: int
    """Coded elements; all of them with `WHOLE`."""
    data: torch.Tensor
    """uint8 [`coded_bytes`], dense: gaps, then new bits."""

    @classmethod
    def all_of(cls, elements: torch.Tensor) -> "Changes":
        """Return all elements in place of changes; they are not copied."""
        return cls(WHOLE, len(elements), elements.view(torch.uint8))


def coded(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """Code the changes of elements. On a GPU it waits for their number.

    Args:
        old: integers of the elements' size, dense, one dimension.
        new: as `old`.
    """
    changed = old != new
    least, nbytes = int(changed.count_nonzero()), new.nbytes
    if not least:
        return Changes(min(WIDTHS), 0, new.new_empty(0, dtype=torch.uint8))
    if coded_bytes(min(WIDTHS), least, new.itemsize) < nbytes:
        gaps = _indices(changed)
        gaps = gaps.diff(prepend=gaps.new_full((1,), -1)).sub_(1)
        counts = [least + n for n in torch.stack([_fillers(gaps, width).sum() for width in WIDTHS]).tolist()]
        sizes = [coded_bytes(width, count, new.itemsize) for width, count in zip(WIDTHS, counts, strict=True)]
        if (size := min(sizes)) < nbytes:
            width, count = WIDTHS[sizes.index(size)], counts[sizes.index(size)]
            gaps = _divided(gaps, width, count)
            values = new[_positions(gaps)]
            parts = (gaps.to(GAPS[width]), values)
            return Changes(width, count, torch.cat([part.view(torch.uint8) for part in parts]))
    return Changes.all_of(new)


def apply(changes: Changes, target: torch.Tensor) -> None:
    """Write coded changes over elements. A wrong position may change any of them, never other memory.

    Args:
        changes: of at most as many elements as there are.
        target: integers of the elements' size, one dimension, at the older version.
    """
    width, count, data = changes
    middle = width * count
    values = data[middle:].clone().view(target.dtype)  # a clone is aligned
    if width == WHOLE:
        target.copy_(values)
    elif count:
        most = (1 << 8 * width) - 1
        gaps = data[:middle].clone().view(GAPS[width]).to(torch.int64) & most
        # On a GPU a position behind the end would end the process. Digests find what it changes instead.
        target[_positions(gaps).clamp_(max=len(target) - 1)] = values


def _indices(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices of true elements, ascending."""
    # on a CPU numpy takes a third of torch's time
    return mask.nonzero().view(-1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


def _positions(gaps: torch.Tensor) -> torch.Tensor:
    return (gaps + 1).cumsum_(0).sub_(1)


def _fillers(gaps: torch.Tensor, width: int) -> torch.Tensor:
    """Return how many elements are written again, unchanged, before each changed one."""
    return gaps >> (8 * width)


def _divided(gaps: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Return gaps that the width holds, for elements written again and the changed ones: int64 [count]."""
    if count == len(gaps):
        return gaps
    most = (1 << 8 * width) - 1
    found = gaps.new_full((count,), most)
    found[_positions(_fillers(gaps, width))] = gaps & most
    return found
