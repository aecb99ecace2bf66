"""Describes a slice of a tensor as runs of words at equal distances, for kernels that digest it in place."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from protocol.weights.boxes import Box
from protocol.weights.digests import ROW

WORD_BYTES = 4
MAX_STRIPS = 64
"""Strips of one slice, at most."""
MAX_WORDS = (1 << 31) - 2 * ROW
"""A kernel counts a strip's words in 32 bits."""


class Strip(NamedTuple):
    """Runs of words in the whole tensor, and where they lie in the memory of the slice."""

    source: int
    """Words from the slice's first element to the first run."""
    start: int
    """First word in the tensor."""
    runs: int
    width: int
    """Words of a run."""
    pitch: int
    """Words in the tensor from the start of a run to the next one's."""
    source_pitch: int
    """Words in the memory of the slice between the same two."""

    @property
    def rows(self) -> int:
        """Number of rows of the digest that the strip lies in, those between its runs included."""
        last = self.start + (self.runs - 1) * self.pitch + self.width - 1
        return last // ROW - self.start // ROW + 1


@lru_cache(maxsize=1 << 16)
def strips_of(
    shape: Sequence[int], box: Box, strides: Sequence[int], itemsize: int
) -> tuple[Strip, ...] | None:
    """Return the strips that make up a slice.

    Args:
        shape: the whole tensor's shape; the tensor is dense.
        box: the slice's place in it.
        strides: of the slice where it lies, in elements.
        itemsize: bytes of an element.

    Returns:
        None if runs do not begin and end between two words, or there are too many strips.
    """
    if not math.prod(stop - start for start, stop in box):
        return ()
    base, dims = _merged(shape, box, strides)
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))  # single elements
    if len(dims) == 1:
        dims.insert(0, (1, dims[0][0], dims[0][0]))
    *outer, (runs, pitch, source_pitch), (width, _, _) = dims
    sizes = [base, width, pitch, source_pitch, *(step for _, *steps in outer for step in steps)]
    if any(size * itemsize % WORD_BYTES for size in sizes) or math.prod(n for n, _, _ in outer) > MAX_STRIPS:
        return None

    def words(elements: int) -> int:
        return elements * itemsize // WORD_BYTES

    found = []
    for index in itertools.product(*(range(n) for n, _, _ in outer)):
        start = base + sum(i * step for i, (_, step, _) in zip(index, outer, strict=True))
        source = sum(i * step for i, (_, _, step) in zip(index, outer, strict=True))
        found.append(
            Strip(words(source), words(start), runs, words(width), words(pitch), words(source_pitch))
        )
    too_long = any(runs * max(strip.pitch, strip.source_pitch) >= MAX_WORDS for strip in found)
    return None if too_long else tuple(found)


def _merged(shape: Sequence[int], box: Box, strides: Sequence[int]) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the slice's first element in the tensor, and its dimensions from the outermost one.

    Each is (size, step in the tensor, step in the slice's memory); dimensions of one index are left out,
    others joined where both steps allow it.
    """
    base, dims = 0, list[tuple[int, int, int]]()
    step = math.prod(shape)
    for (start, stop), n, stride in zip(box, shape, strides, strict=True):
        step //= n
        base += start * step
        if stop - start == 1:
            continue
        size = stop - start
        if dims and dims[-1][1] == size * step and dims[-1][2] == size * stride:
            dims[-1] = (dims[-1][0] * size, step, stride)
        else:
            dims.append((size, step, stride))
    return base, dims
