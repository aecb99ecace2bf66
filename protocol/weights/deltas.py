"""Codes the changes between two versions of a tensor, and reads and applies them.

A delta is a directory of a version next to its anchor's:

    delta.bin       for one changed tensor after the other: gaps, then values
    delta.msgpack   `Delta`: which two versions, and where each tensor's changes are

Of a tensor the changed elements are coded in ascending order: the number of unchanged elements before each,
in an unsigned integer of one width for the tensor, and its new bits. A gap that the width does not hold is
divided by elements that are written again, unchanged. The width is the one with the fewest bytes. A tensor
whose changes would take more bytes than the tensor comes whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import WeightError
from protocol.messages.weights import TensorEntry, WeightLink

BYTES = "delta.bin"
INDEX = "delta.msgpack"
WIDTHS = (1, 2, 4)
"""Bytes of a gap."""
WHOLE = 0
"""In place of a width: the bytes of the tensor follow."""
Bits = NDArray[np.unsignedinteger]
"""Elements of a tensor as unsigned integers of their size, one dimension."""


class TensorChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of one tensor."""

    tensor: int
    """Index into the manifest's `tensors`."""
    width: int
    """Bytes of a gap, or `WHOLE`."""
    count: int
    """Coded elements; all of them if the tensor comes whole."""
    offset: int
    """Byte of `delta.bin` at which the gaps begin."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a delta."""

    base: int
    """Digest of the version that it changes."""
    digest: int
    """Digest of the version that it gives."""
    changes: tuple[TensorChange, ...]
    """Tensors that changed, in the manifest's order."""


class Coded(NamedTuple):
    """Coded changes of one tensor."""

    width: int
    elements: int
    parts: tuple[NDArray[np.generic], ...]
    """Arrays whose bytes follow each other in `delta.bin`."""


def bits(raw: NDArray[np.uint8], itemsize: int) -> Bits:
    """Return bytes of a tensor as its elements; they start at a multiple of `itemsize`."""
    return raw.view(f"<u{itemsize}")


def coded(old: Bits, new: Bits) -> Coded | None:
    """Code the changes of a tensor; None if there are none."""
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return None
    gaps = np.diff(changed, prepend=-1) - 1
    sizes = {width: (len(gaps) + _fillers(gaps, width).sum()) * (width + new.itemsize) for width in WIDTHS}
    width = min(sizes, key=lambda width: sizes[width])
    if sizes[width] >= new.nbytes:
        return Coded(WHOLE, len(new), (new,))
    gaps = _divided(gaps, width)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    return Coded(width, len(gaps), (gaps, new[positions]))


def apply_change(change: TensorChange, data: NDArray[np.uint8], target: Bits, entry: TensorEntry) -> None:
    """Write coded changes over a tensor.

    Args:
        change: the changes.
        data: all of `delta.bin`.
        target: the tensor at the base version; if it fails, some elements may be changed.
        entry: the tensor's.

    Raises:
        WeightError: they leave the file or the tensor; names the tensor.
    """
    end = change.offset + change.count * (change.width + target.itemsize)
    if change.offset < 0 or change.count < 0 or end > len(data) or change.width not in (WHOLE, *WIDTHS):
        raise WeightError(f"tensor {entry.name}: its changes leave the delta")
    middle = change.offset + change.count * change.width
    # copies: a tensor's changes start anywhere
    values = np.frombuffer(data[middle:end].tobytes(), target.dtype)
    if change.width == WHOLE:
        if change.count != len(target):
            raise WeightError(f"tensor {entry.name}: {change.count} elements, it has {len(target)}")
        target[:] = values
        return
    gaps = np.frombuffer(data[change.offset : middle].tobytes(), f"<u{change.width}")
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(positions) and positions[-1] >= len(target):
        raise WeightError(f"tensor {entry.name}: changes element {positions[-1]}, it has {len(target)}")
    target[positions] = values


def read_delta(data: bytes, base: WeightLink, link: WeightLink, tensors: int) -> Delta:
    """Decode the index of a delta.

    Args:
        data: all of `delta.msgpack`.
        base: the link before it, which the delta has to change.
        link: the delta's own, whose version it has to give.
        tensors: number of the manifest's tensors.

    Raises:
        WeightError: it is damaged, changes another version, or gives another; names the link.
    """
    path = f"{link.directory}/{INDEX}"
    try:
        delta = msgspec.msgpack.decode(data, type=Delta)
    except msgspec.MsgspecError as error:
        raise WeightError(f"{path}: {error}") from error
    if (delta.base, delta.digest) != (base.digest, link.digest):
        raise WeightError(
            f"{path}: changes {delta.base:016x} to {delta.digest:016x}, the manifest says "
            f"{base.digest:016x} ({base.directory}) to {link.digest:016x}"
        )
    order = [change.tensor for change in delta.changes]
    if order != sorted(set(order)) or (order and not 0 <= order[0] <= order[-1] < tensors):
        raise WeightError(f"{path}: changes tensors that the manifest has not, or one twice")
    return delta


def _fillers(gaps: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return how many elements are written again, unchanged, before each changed one."""
    return gaps >> (8 * width)


def _divided(gaps: NDArray[np.int64], width: int) -> NDArray[np.generic]:
    """Return gaps that the width holds, for elements written again and the changed ones."""
    fillers, most = _fillers(gaps, width), (1 << (8 * width)) - 1
    found = np.full(len(gaps) + int(fillers.sum()), most, f"<u{width}")
    found[np.cumsum(fillers + 1) - 1] = gaps & most
    return found


def chain_after(links: Sequence[WeightLink], digest: int | None) -> int:
    """Return the index of the last link that gives the version with this digest; -1 if none does."""
    return max((number for number, link in enumerate(links) if link.digest == digest), default=-1)
