"""Limits the number of values and the nesting depth of a MessagePack document before decoding.

One byte can decode to an object of sixty bytes, so a limit on bytes does not limit memory. Each level of
nesting uses stack.
"""

from protocol.errors import ProtocolError

MAX_ITEMS = 1 << 20
"""Maximum number of values in a document, including keys."""
MANIFEST_ITEMS = 1 << 22
"""Maximum number of values in a weight manifest, which lists all tensors and each rank's pieces. 36,000
tensors in pieces on 8 ranks are three million values."""
MAX_DEPTH = 64
"""Maximum number of nested arrays and maps."""
METADATA_DEPTH = 32
"""Maximum nesting depth of a prompt's metadata, the only part of a message whose structure users choose."""

_FIXED_SIZES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2,
          0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip
"""First byte -> number of bytes that follow, for numbers and extensions of fixed size."""
_SINGLE_BYTES = (0xC0, 0xC2, 0xC3)
_LENGTH_PREFIXED = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
"""First byte -> (bytes of the length field, bytes between length and data), for binary, extensions and text.
"""
_COUNT_PREFIXED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte -> (bytes of the count field, values per element), for arrays and maps."""
_VARIABLE_SIZE = 0


def _length(first: int) -> int:
    """Return the size of a value from its first byte, or `_VARIABLE_SIZE` if later bytes give the size."""
    if first < 0x80 or first >= 0xE0 or first in _SINGLE_BYTES:
        return 1
    if 0xA0 <= first < 0xC0:  # text
        return 1 + (first & 0x1F)
    return 1 + _FIXED_SIZES[first] if first in _FIXED_SIZES else _VARIABLE_SIZE


_LENGTHS = tuple(map(_length, range(256)))


def check_shape(
    data: bytes | bytearray | memoryview, *, max_items: int = MAX_ITEMS, max_depth: int = MAX_DEPTH
) -> None:
    """Check a document against the limits without decoding it.

    Args:
        data: exactly one document.
        max_items: maximum number of values, including keys.
        max_depth: maximum nesting depth.

    Raises:
        ProtocolError: the document exceeds a limit, is truncated, or has trailing bytes; or a container
            declares more values than bytes remain.
    """
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else data
    end, at, items = len(view), 0, 1
    open_counts = [1]
    lengths = _LENGTHS  # local names are faster in a loop over a million values
    try:
        while open_counts:
            left = open_counts.pop()
            while left:
                left -= 1
                first = view[at]
                if length := lengths[first]:
                    at += length
                    continue
                at += 1
                if first in _LENGTH_PREFIXED:
                    width, gap = _LENGTH_PREFIXED[first]
                    at += width + gap + int.from_bytes(view[at : at + width], "big")
                    continue
                count, at = _children(first, view, at)
                items += count
                if items > max_items or count > end - at:
                    raise ProtocolError(
                        f"document of {end} bytes declares {items} values; "
                        f"at most {max_items}, each of a byte or more"
                    )
                open_counts.append(left)
                left = count
                if len(open_counts) > max_depth:
                    raise ProtocolError(f"document is nested deeper than {max_depth} levels")
    except IndexError:
        raise ProtocolError(f"document of {end} bytes is cut short") from None
    if at != end:
        raise ProtocolError(
            f"document of {end} bytes " + ("is cut short" if at > end else f"ends after {at}")
        )


def _children(first: int, view: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number of values in an array or map, and the position of the first value."""
    if first < 0x90:
        return (first & 0x0F) * 2, position
    if first < 0xA0:
        return first & 0x0F, position
    if first not in _COUNT_PREFIXED:
        raise ProtocolError(f"byte {first:#04x} begins no MessagePack value")
    width, each = _COUNT_PREFIXED[first]
    return int.from_bytes(view[position : position + width], "big") * each, position + width
