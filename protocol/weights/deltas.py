"""Describes a version by its changes to the previous version, and reads such descriptions.

A delta is the directory of a version, next to the directory of its anchor:

    delta_00000.bin ...   one file per trainer rank: for each changed piece gaps, then new bits
    delta.msgpack         `Delta`: the two versions, and the position of each piece's changes

`protocol/device/changes.py` describes the encoding of changed elements.
"""

from collections.abc import Sequence

import msgspec

from protocol.errors import WeightError
from protocol.messages.weights import TensorEntry, WeightLink
from protocol.weights.boxes import Box, is_within, size_of, whole
from protocol.weights.buckets import DTYPE_BYTES

INDEX = "delta.msgpack"
GAP_WIDTHS = (1, 2, 4)
"""Bytes per gap."""
NO_BASE = WeightLink("", 0, 0)
"""Placeholder for the link before an anchor."""
WHOLE = 0
"""Placeholder for the gap width if the elements themselves follow."""


class TensorChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of one tensor."""

    tensor: int
    """Index into the manifest's `tensors`."""
    width: int
    """Bytes per gap, or `WHOLE`."""
    count: int
    """Number of encoded elements; all elements with `WHOLE`."""
    offset: int
    """Byte offset of the gaps in the file."""
    file: int = 0
    """Index of the file; trainer rank."""
    box: Box = ()
    """Box of the tensor that contains the elements, in its order; empty: the whole tensor."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `delta.msgpack`."""

    base: int
    """Digest of the previous version; 0: none, the delta has all bytes."""
    digest: int
    """Digest of the resulting version."""
    changes: tuple[TensorChange, ...]
    """Changed pieces, ordered by tensor."""
    sizes: tuple[int, ...]
    """Size of each file, bytes."""


def changes_name(number: int) -> str:
    """Return the name of a delta file in a version's directory."""
    return f"delta_{number:05d}.bin"


def coded_bytes(width: int, count: int, itemsize: int) -> int:
    """Return the size of `count` encoded elements, bytes; with `WHOLE`, of the elements themselves."""
    return count * (width + itemsize)


def check_change(change: TensorChange, sizes: Sequence[int], entry: TensorEntry) -> None:
    """Check that changes fit their file and their tensor.

    Args:
        sizes: size of each file, bytes.

    Raises:
        WeightError: the changes exceed their file, or their number of elements is wrong. The message names
            the tensor.
    """
    itemsize = DTYPE_BYTES[entry.dtype]
    nbytes = sizes[change.file] if 0 <= change.file < len(sizes) else 0
    end = change.offset + coded_bytes(change.width, change.count, itemsize)
    if change.offset < 0 or change.count < 0 or end > nbytes or change.width not in (WHOLE, *GAP_WIDTHS):
        raise WeightError(f"tensor {entry.name}: its changes exceed the delta file")
    box = change.box or whole(entry.shape)
    if not is_within(box, entry.shape):
        raise WeightError(f"tensor {entry.name}: changes of {box} are not in {list(entry.shape)}")
    elements = size_of(box)
    if change.count > elements or (change.width == WHOLE and change.count != elements):
        raise WeightError(f"tensor {entry.name}: {change.count} elements, there are {elements}")


def read_delta(data: bytes, base: WeightLink, link: WeightLink, tensors: int) -> Delta:
    """Decode the index of a delta.

    Args:
        data: contents of `delta.msgpack`.
        base: previous link, which the delta must change.
        link: link of the delta, whose version must result.
        tensors: number of tensors in the manifest.

    Raises:
        WeightError: the index is damaged, changes another version, or results in another. The message names
            the link.
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
    """Return the index of the last link that results in the version with this digest; -1 if none does."""
    return max((number for number, link in enumerate(links) if link.digest == digest), default=-1)
