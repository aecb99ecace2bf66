"""Encodes the changed elements between two versions, and applies them to the older version, on any device.

Each changed element, in ascending order, is encoded as a gap and its new bits. The gap is the number of
unchanged elements before it, an unsigned integer. All gaps have the width that needs the fewest bytes. A gap
that exceeds the width is split by filler elements, which are rewritten unchanged. If the changes would need
more bytes than all elements, all elements are encoded.
"""

from typing import NamedTuple

import numpy as np
import torch

from protocol.weights.deltas import GAP_WIDTHS, WHOLE, coded_bytes

GAP_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Width of a gap, bytes -> dtype of that size, read as unsigned."""


class Changes(NamedTuple):
    """Encoded changes of elements."""

    width: int
    """Bytes per gap, or `WHOLE`."""
    elements: int
    """Number of encoded elements; with `WHOLE`, all elements."""
    data: torch.Tensor
    """uint8 [`coded_bytes`], dense: gaps, then new bits."""

    @classmethod
    def all_of(cls, elements: torch.Tensor) -> "Changes":
        """Return an encoding of all elements, which are not copied."""
        return cls(WHOLE, len(elements), elements.view(torch.uint8))


def encode_changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """Encode the changed elements. On a GPU, the call waits for their number.

    Args:
        old, new: integers of the elements' size, dense, one dimension.
    """
    changed = old != new
    changed_count, nbytes = int(changed.count_nonzero()), new.nbytes
    if not changed_count:
        return Changes(min(GAP_WIDTHS), 0, new.new_empty(0, dtype=torch.uint8))
    if coded_bytes(min(GAP_WIDTHS), changed_count, new.itemsize) < nbytes:
        gaps = _indices(changed)
        gaps = gaps.diff(prepend=gaps.new_full((1,), -1)).sub_(1)
        counts = [
            changed_count + n
            for n in torch.stack([_fillers(gaps, width).sum() for width in GAP_WIDTHS]).tolist()
        ]
        sizes = [
            coded_bytes(width, count, new.itemsize) for width, count in zip(GAP_WIDTHS, counts, strict=True)
        ]
        if (size := min(sizes)) < nbytes:
            width, count = GAP_WIDTHS[sizes.index(size)], counts[sizes.index(size)]
            gaps = _split_gaps(gaps, width, count)
            values = new[_positions(gaps)]
            parts = (gaps.to(GAP_DTYPES[width]), values)
            return Changes(width, count, torch.cat([part.view(torch.uint8) for part in parts]))
    return Changes.all_of(new)


def apply(changes: Changes, target: torch.Tensor) -> None:
    """Write encoded changes over elements.

    A wrong position may change any element, but never other memory.

    Args:
        changes: changes of at most `len(target)` elements.
        target: elements at the older version, as integers of their size, one dimension.
    """
    width, count, data = changes
    middle = width * count
    values = data[middle:].clone().view(target.dtype)  # a clone is aligned
    if width == WHOLE:
        target.copy_(values)
    elif count:
        most = (1 << 8 * width) - 1
        gaps = data[:middle].clone().view(GAP_DTYPES[width]).to(torch.int64) & most
        # On a GPU an index past the end would kill the process. Digests detect a wrong element instead.
        target[_positions(gaps).clamp_(max=len(target) - 1)] = values


def _indices(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices of true elements, ascending."""
    # on a CPU numpy takes a third of torch's time
    return mask.nonzero().view(-1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


def _positions(gaps: torch.Tensor) -> torch.Tensor:
    return (gaps + 1).cumsum_(0).sub_(1)


def _fillers(gaps: torch.Tensor, width: int) -> torch.Tensor:
    """Return the number of filler elements before each changed element."""
    return gaps >> (8 * width)


def _split_gaps(gaps: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Return gaps that fit the width, for filler and changed elements: int64 [count]."""
    if count == len(gaps):
        return gaps
    most = (1 << 8 * width) - 1
    found = gaps.new_full((count,), most)
    found[_positions(_fillers(gaps, width))] = gaps & most
    return found
