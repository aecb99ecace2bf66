"""Describes a version as the changes of the one before it, and reads that description.

A delta is a directory of a version next to its anchor's:

    delta_00000.bin ...   of each trainer rank: for one changed piece after the other gaps, then new bits
    delta.msgpack         `Delta`: which two versions, and where each piece's changes are

How changed elements are coded is in `protocol/device/changes.py`.
"""

from collections.abc import Sequence

import msgspec

from protocol.errors import WeightError
from protocol.messages.weights import TensorEntry, WeightLink
from protocol.weights.boxes import Box, is_within, size_of, whole
from protocol.weights.buckets import DTYPE_BYTES

INDEX = "delta.msgpack"
WIDTHS = (1, 2, 4)
"""Bytes of a gap."""
NOTHING = WeightLink("", 0, 0)
"""In place of the link before an anchor."""
WHOLE = 0
"""In place of a width: the bytes of the tensor follow."""


class TensorChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of one tensor."""

    tensor: int
    """Index into the manifest's `tensors`."""
    width: int
    """Bytes of a gap, or `WHOLE`."""
    count: int
    """Coded elements; all of them if the tensor comes whole."""
    offset: int
    """Byte of the file at which the gaps begin."""
    file: int = 0
    """Number of the file."""
    box: Box = ()
    """Box of the tensor whose elements these are, in its order; without one, the whole tensor."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a delta."""

    base: int
    """Digest of the version that it changes; 0: none, it has all bytes."""
    digest: int
    """Digest of the version that it gives."""
    changes: tuple[TensorChange, ...]
    """Pieces that changed, ordered by tensor."""
    sizes: tuple[int, ...]
    """Bytes of each file."""


def changes_name(number: int) -> str:
    """Return the name of a file of changes in a version's directory."""
    return f"delta_{number:05d}.bin"


def coded_bytes(width: int, count: int, itemsize: int) -> int:
    """Return the bytes of so many coded elements; with `WHOLE` of the elements themselves."""
    return count * (width + itemsize)


def check_change(change: TensorChange, sizes: Sequence[int], entry: TensorEntry) -> None:
    """Refuse changes that cannot be a tensor's.

    Args:
        change: the changes.
        sizes: bytes of each file.
        entry: the tensor's.

    Raises:
        WeightError: they leave the file, or are of more or fewer elements; names the tensor.
    """
    itemsize = DTYPE_BYTES[entry.dtype]
    nbytes = sizes[change.file] if 0 <= change.file < len(sizes) else 0
    end = change.offset + coded_bytes(change.width, change.count, itemsize)
    if change.offset < 0 or change.count < 0 or end > nbytes or change.width not in (WHOLE, *WIDTHS):
        raise WeightError(f"tensor {entry.name}: its changes leave the delta")
    box = change.box or whole(entry.shape)
    if not is_within(box, entry.shape):
        raise WeightError(f"tensor {entry.name}: changes of {box} are not in {list(entry.shape)}")
    elements = size_of(box)
    if change.count > elements or (change.width == WHOLE and change.count != elements):
        raise WeightError(f"tensor {entry.name}: {change.count} elements, there are {elements}")


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
    order = [(change.tensor, change.box) for change in delta.changes]
    if order != sorted(set(order)) or (order and not 0 <= order[0][0] <= order[-1][0] < tensors):
        raise WeightError(f"{path}: changes tensors that the manifest has not, or one twice")
    if sum(delta.sizes) != link.nbytes or min(delta.sizes, default=0) < 0:
        raise WeightError(f"{path}: files of {list(delta.sizes)} bytes, the manifest says {link.nbytes}")
    return delta


def chain_after(links: Sequence[WeightLink], digest: int | None) -> int:
    """Return the index of the last link that gives the version with this digest; -1 if none does."""
    return max((number for number, link in enumerate(links) if link.digest == digest), default=-1)
