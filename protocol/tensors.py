"""Encodes arrays for the wire as dtype, shape and raw little-endian bytes, without lists or pickles."""

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtocolError

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "uint16", "bool", "int32", "int64", "float16", "float32", "float64")
}
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 40
"""Limit on the number of elements in a declared shape; more than any frame can hold."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A dense array, `[dtype, shape, data]` in MessagePack."""

    dtype: str
    """One of `DTYPES`."""
    shape: tuple[int, ...]
    data: memoryview
    """Elements, C-contiguous and little-endian."""

    @classmethod
    def of(cls, values: Any, dtype: str) -> "Array":
        """Return `values` (any input of `numpy.asarray`) as an array of `dtype`.

        Raises:
            KeyError: `dtype` is not one of `DTYPES`.
        """
        packed = np.asarray(values, dtype=DTYPES[dtype], order="C")
        return cls(dtype, tuple(packed.shape), memoryview(packed.tobytes()))

    def numpy(self) -> NDArray[Any]:
        """Return a read-only view of the data.

        Raises:
            ProtocolError: the dtype is unknown, or shape and byte count do not match.
        """
        kind = DTYPES.get(self.dtype)
        if kind is None:
            raise ProtocolError(f"array dtype {self.dtype!r} is not one of {sorted(DTYPES)}")
        # The product skips zeros: numpy refuses large dimensions even if another dimension is 0.
        if (
            len(self.shape) > MAX_DIMS
            or any(n < 0 for n in self.shape)
            or math.prod(n for n in self.shape if n) > MAX_ELEMENTS
        ):
            raise ProtocolError(f"array shape {self.shape} is not valid")
        expected = math.prod(self.shape) * kind.itemsize
        if expected != len(self.data):
            raise ProtocolError(
                f"array {self.dtype}{list(self.shape)} needs {expected} bytes, got {len(self.data)}"
            )
        return np.frombuffer(self.data, dtype=kind).reshape(self.shape)
