"""Tests what a delta says of itself, and what is refused of it."""

import msgspec
import pytest

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightLink
from protocol.weights.deltas import INDEX, WHOLE, Delta, TensorChange, check_change, read_delta


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (TensorChange(0, 1, 3, 0), "its changes leave the delta"),
        (TensorChange(0, 1, 2, 5), "its changes leave the delta"),
        (TensorChange(0, 1, 1, -1), "its changes leave the delta"),
        (TensorChange(0, 1, -1, 0), "its changes leave the delta"),
        (TensorChange(0, 3, 1, 0), "its changes leave the delta"),
        (TensorChange(0, WHOLE, 1, 0), "1 elements, it has 2"),
        (TensorChange(0, WHOLE, 3, 0), "3 elements, it has 2"),
    ],
)
def test_changes_that_leave_delta_or_tensor_are_refused(change: TensorChange, words: str) -> None:
    entry = TensorEntry("a", "bfloat16", (2,), 0, 0, 4, 0)
    with pytest.raises(WeightError, match=f"tensor a: {words}"):
        check_change(change, 7, entry)
    check_change(TensorChange(0, 1, 2, 1), 7, entry)


BASE, LINK = WeightLink("v1", 11, 4), WeightLink("v2", 12, 4)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (Delta(base=10, digest=12, changes=()), r"changes 0*a to 0*c, the manifest says 0*b \(v1\) to 0*c"),
        (Delta(base=11, digest=13, changes=()), r"changes 0*b to 0*d"),
        (Delta(base=11, digest=12, changes=(TensorChange(2, 1, 0, 0),)), "tensors that the manifest has not"),
        (
            Delta(base=11, digest=12, changes=(TensorChange(-1, 1, 0, 0),)),
            "tensors that the manifest has not",
        ),
        (Delta(base=11, digest=12, changes=(TensorChange(1, 1, 0, 0),) * 2), "one twice"),
    ],
)
def test_delta_of_other_versions_or_tensors_is_refused(delta: Delta, words: str) -> None:
    with pytest.raises(WeightError, match=words):
        read_delta(msgspec.msgpack.encode(delta), BASE, LINK, 2)


def test_delta_that_is_cut_off_is_refused() -> None:
    whole = msgspec.msgpack.encode(Delta(base=11, digest=12, changes=(TensorChange(1, 1, 0, 0),)))
    for size in range(len(whole)):
        with pytest.raises(WeightError, match=f"v2/{INDEX}: "):
            read_delta(whole[:size], BASE, LINK, 2)
    assert read_delta(whole, BASE, LINK, 2).changes == (TensorChange(1, 1, 0, 0),)
