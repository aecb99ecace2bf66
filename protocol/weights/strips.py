"""Describes a slice of a tensor as equidistant runs of words, for kernels that digest the slice in place."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from protocol.weights.boxes import Box
from protocol.weights.digests import ROW

WORD_BYTES = 4
MAX_STRIPS = 64
"""Maximum number of strips of one slice."""
MAX_WORDS = (1 << 31) - 2 * ROW
"""Maximum words of a strip; a kernel counts them in 32 bits."""


class Strip(NamedTuple):
    """Equidistant runs of words in the whole tensor and in the memory of the slice."""

    source: int
    """Words from the slice's first element to the first run."""
    start: int
    """First word in the tensor."""
    runs: int
    width: int
    """Words per run."""
    pitch: int
    """Words between the starts of two runs in the tensor."""
    source_pitch: int
    """Words between the starts of two runs in the memory of the slice."""

    @property
    def rows(self) -> int:
        """Number of digest rows from the strip's first to its last word."""
        last = self.start + (self.runs - 1) * self.pitch + self.width - 1
        return last // ROW - self.start // ROW + 1


@lru_cache(maxsize=1 << 16)
def strips_of(
    shape: Sequence[int], box: Box, strides: Sequence[int], itemsize: int
) -> tuple[Strip, ...] | None:
    """Return the strips that make up a slice.

    Args:
        shape: shape of the whole tensor, which is dense.
        box: position of the slice in the whole tensor.
        strides: strides of the slice in its memory, in elements.

    Returns:
        None if a run is not aligned to words, or there are too many strips.
    """
    if not math.prod(stop - start for start, stop in box):
        return ()
    base, dims = _merged(shape, box, strides)
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))  # runs of single elements
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
    """Return the offset of the slice's first element in the tensor, and its dimensions, outermost first.

    A dimension is (size, step in the tensor, step in the slice's memory). Dimensions of size 1 are omitted;
    adjacent dimensions are merged if both steps allow it.
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
