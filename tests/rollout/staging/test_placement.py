"""Where slices go in a staging copy."""

import pytest
import torch

from protocol.errors import WeightError
from protocol.weights.boxes import whole
from rollout.staging.placement import ExpectedTensor, Slice, SlicePlacement

SHAPE = (4, 6)
SOURCE = torch.arange(24.0).view(SHAPE)
ROWS = [((0, 1), (0, 6)), ((1, 4), (0, 6))]


def placed(slices: tuple[Slice, ...], boxes: list[tuple[tuple[int, int], ...]]) -> SlicePlacement:
    made = SlicePlacement({"a": ExpectedTensor("float32", SHAPE, slices)})
    made.place(("a", box, SOURCE[tuple(slice(*side) for side in box)]) for box in boxes)
    made.finish()
    return made


def test_slices_of_a_tensor_go_to_the_rows_that_they_fill() -> None:
    fused = torch.zeros(5, 6)
    made = placed(
        (Slice(6, (2, 6), (6, 1), fused[:2]), Slice(0, (1, 6), (6, 1), fused[4:])),
        [((0, 1), (0, 6)), ((1, 2), (0, 6)), ((2, 3), (0, 6))],
    )
    assert made.wanted == {"a": (((0, 1), (0, 6)), ((1, 3), (0, 6)))}
    assert torch.equal(fused, torch.cat([SOURCE[1:3], torch.zeros(2, 6), SOURCE[:1]]))


def test_one_row_goes_to_a_vector() -> None:
    row = torch.zeros(6)
    made = placed((Slice(12, (6,), (1,), row),), [((2, 3), (0, 6))])
    assert made.wanted == {"a": (((2, 3), (0, 6)),)}
    assert torch.equal(row, SOURCE[2])


def test_transposed_tensor_is_wanted_whole_and_filled_when_it_is() -> None:
    target = torch.zeros(6, 4)
    slices = (Slice(0, (6, 4), (1, 6), target),)
    made = placed(slices, ROWS)
    assert made.wanted == {"a": (whole(SHAPE),)}
    assert torch.equal(target, SOURCE.T)
    with pytest.raises(WeightError, match="tensor a did not arrive whole"):
        placed(slices, ROWS[:1])


def test_rows_with_two_places_are_received_once_and_placed_twice() -> None:
    first, second = torch.zeros(SHAPE), torch.zeros(2, 6)
    slices = (Slice(0, SHAPE, (6, 1), first), Slice(12, (2, 6), (6, 1), second))
    made = SlicePlacement({"a": ExpectedTensor("float32", SHAPE, slices)})
    assert made.wanted == {"a": (whole(SHAPE),)}
    made.place(("a", box, SOURCE[box[0][0] : box[0][1]]) for box in ROWS)
    assert torch.equal(first, SOURCE)
    assert torch.equal(second, SOURCE[2:])


def test_of_a_tensor_without_a_place_nothing_is_wanted() -> None:
    assert SlicePlacement({"a": ExpectedTensor("float32", SHAPE, ())}).wanted == {}
