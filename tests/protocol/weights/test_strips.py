"""Strips of a slice: its words, each at its place in the tensor and in the slice's memory."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.weights.boxes import Box
from protocol.weights.digests import ROW
from protocol.weights.strips import MAX_STRIPS, strips_of


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, torch.Tensor]:
    """A shape, a box of it, and a tensor of the box's shape that lies in a larger one."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 8, 60)), max_size=4)))
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape)
    around = [draw(st.sampled_from((0, 0, 2))) for _ in shape]
    outer = torch.zeros([b - a + more for (a, b), more in zip(box, around, strict=True)])
    return shape, box, outer[tuple(slice(b - a) for a, b in box)]


@given(slices(), st.sampled_from((2, 4, 8)))
def test_strips_hold_each_word_of_a_slice_once(
    case: tuple[tuple[int, ...], Box, torch.Tensor], itemsize: int
) -> None:
    shape, box, lies = case
    strips = strips_of(shape, box, lies.stride(), itemsize)
    if strips is None:
        assert itemsize == 2 or lies.dim() == 4
        return
    item = np.arange(itemsize) % 4 == 0 if itemsize > 2 else np.array([True])  # its words' first bytes
    expected = []
    for index in np.ndindex(*(stop - start for start, stop in box)):
        place = [start + i for (start, _), i in zip(box, index, strict=True)]
        there = int(np.ravel_multi_index(place, shape)) if shape else 0
        here = sum(i * step for i, step in zip(index, lies.stride(), strict=True))
        for byte in np.flatnonzero(item):
            expected.append(((there * itemsize + int(byte)) / 4, (here * itemsize + int(byte)) / 4))
    found = [
        (strip.start + run * strip.pitch + word, strip.source + run * strip.source_pitch + word)
        for strip in strips
        for run in range(strip.runs)
        for word in range(strip.width)
    ]
    assert sorted(found) == sorted(pair for pair in expected if pair[0] == int(pair[0]))


@pytest.mark.parametrize(
    ("shape", "box", "itemsize"),
    [
        ((4, 6), ((0, 4), (1, 3)), 2),
        ((3, 3), ((1, 2), (0, 3)), 2),
        ((3,), ((0, 3),), 2),
        ((5,), ((0, 5),), 1),
    ],
)
def test_runs_that_end_within_a_word_are_no_strips(shape: tuple[int, ...], box: Box, itemsize: int) -> None:
    strides = torch.zeros([stop - start for start, stop in box]).stride()
    assert strips_of(shape, box, strides, itemsize) is None


def test_columns_of_many_matrices_are_too_many_strips() -> None:
    for count, found in ((MAX_STRIPS, MAX_STRIPS), (MAX_STRIPS + 1, None)):
        box = ((0, count), (0, 3), (0, 4))
        strips = strips_of((count, 5, 8), box, (12, 4, 1), 4)
        assert (strips and len(strips)) == found


def test_rows_of_the_digest_are_counted_from_the_first_word_to_the_last() -> None:
    (whole,) = strips_of((ROW + 1,), ((0, ROW + 1),), (1,), 4) or ()
    (columns,) = strips_of((3, ROW), ((0, 3), (ROW - 1, ROW)), (1, 1), 4) or ()
    assert (whole.rows, columns.start, columns.rows) == (2, ROW - 1, 3)
