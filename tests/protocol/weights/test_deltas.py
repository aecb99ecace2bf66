"""Tests what a delta says of itself, and what is refused of it."""

import msgspec
import pytest

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightLink
from protocol.weights.deltas import INDEX, WHOLE, Delta, TensorChange, check_change, read_delta

ENTRY = TensorEntry("a", "bfloat16", (2, 3), 0, 0, 12, 0)
SIZES = (20, 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (TensorChange(0, 1, 3, 0, 1), "its changes exceed the delta file"),
        (TensorChange(0, 1, 2, 5, 1), "its changes exceed the delta file"),
        (TensorChange(0, 1, 1, -1), "its changes exceed the delta file"),
        (TensorChange(0, 1, -1, 0), "its changes exceed the delta file"),
        (TensorChange(0, 3, 1, 0), "its changes exceed the delta file"),
        (TensorChange(0, 1, 1, 0, 2), "its changes exceed the delta file"),
        (TensorChange(0, 1, 1, 0, -1), "its changes exceed the delta file"),
        (TensorChange(0, WHOLE, 5, 0), "5 elements, there are 6"),
        (TensorChange(0, WHOLE, 7, 0), "7 elements, there are 6"),
        (TensorChange(0, WHOLE, 6, 0, 0, ((0, 1), (0, 3))), "6 elements, there are 3"),
        (TensorChange(0, 1, 4, 0, 0, ((0, 1), (0, 3))), "4 elements, there are 3"),
        (
            TensorChange(0, 1, 1, 0, 0, ((0, 1), (0, 4))),
            r"changes of \(\(0, 1\), \(0, 4\)\) are not in \[2, 3\]",
        ),
        (TensorChange(0, 1, 1, 0, 0, ((0, 1),)), r"changes of \(\(0, 1\),\) are not in \[2, 3\]"),
        (TensorChange(0, 1, 1, 0, 0, ((1, 0), (0, 3))), r"changes of \(\(1, 0\), \(0, 3\)\) are not in"),
    ],
)
def test_changes_that_leave_file_or_tensor_are_refused(change: TensorChange, words: str) -> None:
    with pytest.raises(WeightError, match=f"tensor a: {words}"):
        check_change(change, SIZES, ENTRY)


def test_changes_that_fit_are_accepted() -> None:
    check_change(TensorChange(0, 1, 2, 1, 1), SIZES, ENTRY)
    check_change(TensorChange(0, WHOLE, 6, 8), SIZES, ENTRY)
    check_change(TensorChange(0, WHOLE, 3, 1, 1, ((1, 2), (0, 3))), SIZES, ENTRY)


BASE, LINK = WeightLink("v1", 11, 4), WeightLink("v2", 12, 9)


def delta(*changes: TensorChange, base: int = 11, digest: int = 12, sizes: tuple[int, ...] = (5, 4)) -> Delta:
    return Delta(base=base, digest=digest, changes=changes, sizes=sizes)


ROWS = [TensorChange(1, 1, 0, 0, i, ((i, i + 1), (0, 3))) for i in range(2)]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (delta(base=10), r"changes 0*a to 0*c, the manifest says 0*b \(v1\) to 0*c"),
        (delta(digest=13), r"changes 0*b to 0*d"),
        (delta(TensorChange(2, 1, 0, 0)), "tensors that the manifest has not"),
        (delta(TensorChange(-1, 1, 0, 0)), "tensors that the manifest has not"),
        (delta(*[TensorChange(1, 1, 0, 0)] * 2), "one twice"),
        (delta(ROWS[0], ROWS[0]), "one twice"),
        (delta(sizes=(4, 4)), r"files of \[4, 4\] bytes, the manifest says 9"),
        (delta(sizes=(10, -1)), r"files of \[10, -1\] bytes, the manifest says 9"),
    ],
)
def test_delta_of_other_versions_tensors_or_files_is_refused(found: Delta, words: str) -> None:
    with pytest.raises(WeightError, match=words):
        read_delta(msgspec.msgpack.encode(found), BASE, LINK, 2)


def test_delta_that_is_cut_off_is_refused() -> None:
    whole = msgspec.msgpack.encode(delta(*ROWS))
    for size in range(len(whole)):
        with pytest.raises(WeightError, match=f"v2/{INDEX}: "):
            read_delta(whole[:size], BASE, LINK, 2)
    assert read_delta(whole, BASE, LINK, 2).changes == tuple(ROWS)
