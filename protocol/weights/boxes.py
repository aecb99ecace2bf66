"""Cuts tensors into boxes with pure functions, for the slices of a version.

A box is one (start, stop) per dimension; it contains the elements whose index lies in every range. A tensor
without dimensions is one box without ranges.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, n) for n in shape)


def size_of(box: Box) -> int:
    """Return the number of elements."""
    return math.prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of the box."""
    return tuple(stop - start for start, stop in box)


def is_within(box: Box, shape: Sequence[int]) -> bool:
    """Return whether a box, possibly empty, lies within a tensor of this shape."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True)
    )


def intersection(left: Box, right: Box) -> Box | None:
    """Return the intersection of two boxes of one tensor; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def relative(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of a box in a tensor that holds exactly the elements of the enclosing box `outer`."""
    return tuple(
        slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )


def hull(left: Box, right: Box) -> Box:
    """Return the smallest box that contains both boxes."""
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))


def disjoint(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return disjoint boxes that cover the given boxes; overlapping boxes are merged into their hull."""
    parts: list[Box] = []
    for box in boxes:
        while others := [other for other in parts if intersection(other, box) is not None]:
            parts = [other for other in parts if other not in others]
            for other in others:
                box = hull(box, other)
        if size_of(box):
            parts.append(box)
    return tuple(sorted(parts))


def remainder(box: Box, holes: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that cover a box without the holes."""
    left = [box] if size_of(box) else []
    for hole in holes:
        left = [part for piece in left for part in _subtract(piece, hole)]
    return left


def _subtract(box: Box, hole: Box) -> Iterator[Box]:
    shared = intersection(box, hole)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        for side in ((start, first), (last, stop)):
            if side[0] < side[1]:
                yield (*shared[:dim], side, *box[dim + 1 :])


def split(box: Box, max_elements: int) -> list[Box]:
    """Cut a box along its first dimensions into boxes of at most `max_elements` >= 1 elements, in order."""
    if size_of(box) <= max_elements:
        return [box]
    dim = next(i for i, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    each = size_of(box) // (stop - start)
    if each > max_elements:
        cuts = [(i, i + 1) for i in range(start, stop)]
    else:
        parts = -(-(stop - start) // (max_elements // each))
        rows = -(-(stop - start) // parts)  # makes the last part about as large as the others
        cuts = [(i, min(i + rows, stop)) for i in range(start, stop, rows)]
    return [part for cut in cuts for part in split((*box[:dim], cut, *box[dim + 1 :]), max_elements)]


def box_of(shape: Sequence[int], offset: int, size: Sequence[int], stride: Sequence[int]) -> Box | None:
    """Return a strided window of a dense tensor as a box.

    Args:
        offset: offset of the window's first element, in elements.
        size: shape of the window; dimensions of size 1 may be omitted.
        stride: strides of the window, in elements.

    Returns:
        None if the window is not a box with its dimensions in the tensor's order.
    """
    box: list[tuple[int, int]] = []
    dims = list(zip(size, stride, strict=True))
    for dim, n in enumerate(shape):
        step = math.prod(shape[dim + 1 :])
        start, offset = divmod(offset, step) if step else (0, offset)
        length = dims.pop(0)[0] if dims and dims[0][1] == step else 1
        if start + length > n:
            return None
        box.append((start, start + length))
    if any(length != 1 for length, _ in dims):
        return None
    return tuple(box)


@lru_cache(maxsize=4096)
def covers(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> bool:
    """Return whether boxes of a tensor contain each of its elements exactly once."""
    return (
        all(is_within(box, shape) for box in boxes)
        and sum(size_of(box) for box in boxes) == math.prod(shape)
        and all(intersection(left, right) is None for left, right in combinations(boxes, 2))
    )


def dense_span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Return the span (first, end) of a dense tensor's elements that encloses a box, end exclusive.

    From the first dimension in which the box has several indices, the span includes all inner elements of
    each index.
    """
    base, (start, stop), behind = _leading_indices(shape, box)
    return base + start * behind, base + stop * behind


def dense_blocks(shape: Sequence[int], box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box into blocks, in order, whose `dense_span` has `max_elements` at most or covers one index."""
    if not size_of(box):
        return
    _, (start, stop), behind = _leading_indices(shape, box)
    dim = next((i for i, (a, b) in enumerate(box) if b - a > 1), None)
    rows = max(1, max_elements // behind)
    if dim is None:
        yield box
        return
    for first in range(start, stop, rows):
        yield (*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :])


def _leading_indices(shape: Sequence[int], box: Box) -> tuple[int, tuple[int, int], int]:
    """Return the offset of the box's leading single indices, the next range, and the elements per index."""
    base, behind = 0, math.prod(shape)
    for (start, stop), n in zip(box, shape, strict=True):
        behind = behind // n if n else 0
        if stop - start != 1:
            return base, (start, stop), behind
        base += start * behind
    return base, (0, 1), 1
