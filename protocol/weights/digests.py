"""Computes the digest of a tensor's bytes: a multilinear hash, in one pass, in any order, on any device.

    words    the bytes as little-endian int32, padded with zeros, in rows of ROW words
    h[r]     sum over j of words[r, j] * INNER[j]                                               mod 2^64
    digest   bytes * LENGTH + sum over r of low32(h[r]) * OUTER[2 r] + high32(h[r]) * OUTER[2 r + 1]
                                                                                                mod 2^64

All products are of signed numbers; INNER, OUTER and LENGTH are odd 64-bit numbers from splitmix64. If the
multipliers were drawn at random, two strings of the same length would collide with a probability of at most
2^-32 at each level (Carter and Wegman 1979; Lemire and Kaser 2014). The digest detects transfer errors but
does not resist an adversary.

The sums h of disjoint slices of a tensor add up to the tensor's sums, if each slice is digested at its
position with zeros elsewhere. Ranks that hold slices can therefore compute the digest of a tensor that no
single rank holds.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from protocol.codec import Buffer

ROW = 16384
"""Words per row: 64 KiB, which fit in a core's cache together with their multipliers."""
FOLDED_ROWS = 4096
"""Rows folded per batch. A larger batch would exceed a core's cache and allocate new memory each time."""
LENGTH = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def multipliers(stream: int, count: int) -> NDArray[np.int64]:
    """Return the first `count` multipliers of a stream, int64 [count]: stream 0 is INNER, 1 is OUTER."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(LENGTH)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def rows_of(nbytes: int) -> int:
    """Return the number of rows for `nbytes` bytes."""
    return -(-nbytes // (4 * ROW))


def row_span(first_byte: int, end_byte: int) -> tuple[int, int]:
    """Return the span (first, end) of rows that contain these bytes of a tensor, end exclusive."""
    return first_byte // (4 * ROW), rows_of(end_byte)


def digests_of_sums(sums: NDArray[np.int64], sizes: Sequence[int]) -> list[int]:
    """Return the digests of tensors from the sums h of all of their rows.

    One numpy call folds many tensors, because each call costs Python time that delays the engine's steps.

    Args:
        sums: sums of all tensors, concatenated, int64 [rows of all].
        sizes: size of each tensor, bytes.
    """
    halves = np.ascontiguousarray(sums, dtype="<i8").view("<i4")
    rows = [rows_of(nbytes) for nbytes in sizes]
    outer = _outer(2 * max(rows, default=0))
    totals: list[int] = []
    row, first = 0, 0
    while first < len(rows):
        last, end = first + 1, row + rows[first]
        while last < len(rows) and end + rows[last] - row <= FOLDED_ROWS:
            last, end = last + 1, end + rows[last]
        totals += _folded(halves[2 * row : 2 * end], rows[first:last], outer)
        row, first = end, last
    return [
        (total + nbytes * LENGTH) & MASK if nbytes else 0 for total, nbytes in zip(totals, sizes, strict=True)
    ]


def _folded(halves: NDArray[np.int32], rows: Sequence[int], outer: NDArray[np.int64]) -> list[int]:
    """Return the digests of tensors with these numbers of rows, without the length term."""
    starts = np.fromiter(accumulate(rows, initial=0), np.int64)[:-1]
    is_filled = np.array(rows) > 0  # reduceat does not support empty sums
    totals = np.zeros(len(rows), np.int64)
    if len(halves):
        with np.errstate(over="ignore"):
            products = halves * np.concatenate([outer[: 2 * count] for count in rows])
            totals[is_filled] = np.add.reduceat(products, 2 * starts[is_filled])
    found: list[int] = totals.tolist()
    return found


def digest(data: Buffer) -> int:
    """Return the digest of bytes in host memory."""
    raw = np.frombuffer(data, dtype=np.uint8)
    nbytes = len(raw)
    if nbytes % 4:
        raw = np.concatenate([raw, np.zeros(-nbytes % 4, np.uint8)])
    words = raw.view("<i4")
    full = len(words) // ROW * ROW
    sums = [row_sums(words[:full].reshape(-1, ROW), INNER)]
    if full < len(words):
        sums.append(row_sums(words[full:].reshape(1, -1), INNER[: len(words) - full]))
    return digests_of_sums(np.concatenate(sums), [nbytes])[0]


def row_sums(rows: NDArray[np.int32], inner: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums h of rows: int32 [r, k] and the multipliers int64 [k] -> int64 [r]."""
    return np.einsum("ij,j->i", rows, inner)


def _outer(count: int) -> NDArray[np.int64]:
    """Return at least `count` multipliers of rows."""
    return _outer_table(1 << max(12, (count - 1).bit_length()))


@lru_cache(maxsize=2)
def _outer_table(count: int) -> NDArray[np.int64]:
    return multipliers(1, count)


INNER = multipliers(0, ROW)
"""Multipliers of a row."""
