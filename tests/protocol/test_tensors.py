"""Arrays on the wire: round trips, and the arrays that are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.errors import ProtocolError
from protocol.tensors import DTYPES, MAX_DIMS, Array


@given(st.sampled_from(sorted(DTYPES)), st.data())
def test_round_trip_keeps_bits(dtype: str, data: st.DataObject) -> None:
    values = data.draw(
        hnp.arrays(DTYPES[dtype], hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    )
    unpacked = Array.of(values, dtype).numpy()
    assert unpacked.shape == values.shape
    assert unpacked.tobytes() == values.tobytes()


def test_non_contiguous_input_is_packed_in_order() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert Array.of(values, "int32").numpy().tolist() == values.tolist()


def test_view_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Array.of([1], "int32").numpy()[0] = 2


@pytest.mark.parametrize(
    "array",
    [
        Array("int32", (3,), memoryview(b"\0" * 8)),
        Array("object", (1,), memoryview(b"\0" * 8)),
        Array("int32", (-1,), memoryview(b"")),
        Array("uint8", (1,) * (MAX_DIMS + 1), memoryview(b"\0")),
        Array("int32", (2**62, 2**62), memoryview(b"\0")),
        Array("int32", (0, 2**63), memoryview(b"")),
        Array("uint8", (2**40, 2**40, 0), memoryview(b"")),
    ],
)
def test_contradictions_are_refused(array: Array) -> None:
    with pytest.raises(ProtocolError):
        array.numpy()
