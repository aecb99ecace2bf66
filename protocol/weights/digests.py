"""Computes the digest of a tensor's bytes: a multilinear hash, in one pass, in any order, on any device.

    words    the bytes as little-endian int32, padded with zeros, in rows of ROW words
    h[r]     sum over j of words[r, j] * INNER[j]                                               mod 2^64
    digest   bytes * LENGTH + sum over r of low32(h[r]) * OUTER[2 r] + high32(h[r]) * OUTER[2 r + 1]
                                                                                                mod 2^64

All products are of signed numbers; INNER, OUTER and LENGTH are odd 64-bit numbers from splitmix64. If these
were drawn at random, two strings of the same length would collide with a probability of at most 2^-32 at each
level (Carter and Wegman 1979; Lemire and Kaser 2014). The digest detects errors of transfer; it does not
resist an adversary.

The sums h of disjoint slices of a tensor add up to the tensor's sums, if each slice is digested at its place
with zeros elsewhere. So ranks that have slices compute the digest of a tensor that none of them has.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import Buffer

ROW = 16384
"""Words per row: 64 KiB, which fit in a core's cache together with their multipliers."""
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
    """Return the number of rows that `nbytes` bytes take."""
    return -(-nbytes // (4 * ROW))


def fold(words: Any, inner: Any, outer: Any, int32: Any, row_sums: Callable[[Any, Any], Any]) -> Any:
    """Return the digest of `words` without the term of the length; for numpy arrays and torch tensors.

    Args:
        words: [n] int32, n > 0.
        inner: [ROW] int64.
        outer: [at least 2 * rows] int64.
        int32: int32 of the library.
        row_sums: ([r, k] int32, [k] int64) -> [r] int64, the sums of products mod 2^64.

    Returns:
        An int64 scalar of the library.
    """
    full = len(words) // ROW
    rest = len(words) - full * ROW
    total = 0
    if full:
        sums = row_sums(words[: full * ROW].reshape(full, ROW), inner)
        total = (sums.view(int32) * outer[: 2 * full]).sum()
    if rest:
        sums = row_sums(words[full * ROW :].reshape(1, rest), inner[:rest])
        total = (sums.view(int32) * outer[2 * full : 2 * full + 2]).sum() + total
    return total


def row_span(first_byte: int, end_byte: int) -> tuple[int, int]:
    """Return the rows (first, after the last) that hold these bytes of a tensor."""
    return first_byte // (4 * ROW), rows_of(end_byte)


def digest_of_sums(sums: NDArray[np.int64], nbytes: int) -> int:
    """Return the digest of a tensor of `nbytes` bytes from the sums h of all of its rows, int64 [rows]."""
    if not nbytes:
        return 0
    halves = np.ascontiguousarray(sums, dtype="<i8").view("<i4")
    with np.errstate(over="ignore"):
        total = (halves * _outer(len(sums))[: 2 * len(sums)]).sum()
    return finish(int(total), nbytes)


def finish(total: int, nbytes: int) -> int:
    """Return the digest of `nbytes` bytes for which `fold` returned `total`."""
    return (total + nbytes * LENGTH) & MASK


def digest(data: Buffer) -> int:
    """Return the digest of bytes in host memory."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if not len(raw):
        return 0
    if len(raw) % 4:
        raw = np.concatenate([raw, np.zeros(-len(raw) % 4, np.uint8)])
    with np.errstate(over="ignore"):
        total = fold(raw.view("<i4"), INNER, _outer(rows_of(len(raw))), np.int32, row_sums)
    return finish(int(total), memoryview(data).nbytes)


def row_sums(rows: NDArray[np.int32], inner: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums h of rows: int32 [r, k] and the multipliers int64 [k] -> int64 [r]."""
    return np.einsum("ij,j->i", rows, inner)


def _outer(rows: int) -> NDArray[np.int64]:
    return _OUTER if 2 * rows <= len(_OUTER) else multipliers(1, 2 * rows)


INNER = multipliers(0, ROW)
"""Multipliers of a row."""
_OUTER = multipliers(1, 1 << 12)
