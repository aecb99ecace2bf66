"""Boxes of tensors, against sets of their elements."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protocol.weights.boxes import (
    Box,
    box_of,
    covers,
    dense_blocks,
    dense_span,
    disjoint,
    intersection,
    is_within,
    relative,
    remainder,
    shape_of,
    size_of,
    split,
    whole,
)

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int = 2) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    boxes = [
        tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
        for _ in range(count)
    ]
    return shape, [tuple((start, stop) for start, stop in box) for box in boxes]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    position = 0
    for i, n in zip(index, shape, strict=True):
        position = position * n + i
    return position


@given(shape_and_boxes())
def test_intersection_and_remainder_are_those_of_the_elements(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    _, (left, right) = case
    shared = intersection(left, right)
    assert (elements(shared) if shared is not None else set()) == elements(left) & elements(right)
    rest = remainder(left, [right])
    assert sum(size_of(box) for box in rest) == len(elements(left) - elements(right))
    assert set().union(*map(elements, rest)) == elements(left) - elements(right)


@given(shape_and_boxes(4))
def test_disjoint_boxes_hold_all_elements_and_none_twice(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, boxes = case
    found = disjoint(boxes)
    union = set().union(*map(elements, found))
    assert len(union) == sum(size_of(box) for box in found)
    assert union >= set().union(*map(elements, boxes))


@given(shape_and_boxes(1), st.integers(1, 20))
def test_split_boxes_are_small_and_in_order(case: tuple[tuple[int, ...], list[Box]], most: int) -> None:
    shape, (box,) = case
    parts = split(box, most)
    assert [index for part in parts for index in sorted(elements(part))] == sorted(elements(box))
    assert all(size_of(part) <= most for part in parts)
    assert covers(shape, tuple([*parts, *remainder(whole(shape), [box])]))


@given(shape_and_boxes(1), st.integers(1, 20))
def test_dense_spans_hold_the_elements_of_their_blocks(
    case: tuple[tuple[int, ...], list[Box]], most: int
) -> None:
    shape, (box,) = case
    blocks = list(dense_blocks(shape, box, most))
    assert [index for block in blocks for index in sorted(elements(block))] == sorted(elements(box))
    for block in blocks:
        first, end = dense_span(shape, block)
        assert {flat(index, shape) for index in elements(block)} <= set(range(first, end))
        outer = dense_span(shape, box)
        assert outer[0] <= first <= end <= outer[1]


@given(shape_and_boxes(1))
def test_window_of_a_box_is_recognized(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    strides = [flat(tuple(int(i == dim) for i in range(len(shape))), shape) for dim in range(len(shape))]
    offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    if size_of(box):
        assert elements(box_of(shape, offset, shape_of(box), strides) or ()) == elements(box)


def test_windows_that_are_no_boxes_are_not_recognized() -> None:
    assert box_of((4, 6), 0, (6, 4), (1, 6)) is None
    assert box_of((4, 6), 0, (2, 6), (12, 1)) is None
    assert box_of((4, 6), 5, (2,), (1,)) is None
    assert box_of((4, 6), 6, (6,), (1,)) == ((1, 2), (0, 6))


def test_pieces_that_leave_or_repeat_an_element_do_not_cover() -> None:
    rows = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    assert covers((4, 3), tuple(rows))
    assert not covers((4, 3), (rows[0], rows[0]))
    assert not covers((4, 3), (rows[0],))
    assert not covers((4, 3), (rows[0], ((2, 5), (0, 3))))
    assert covers((), ((),))
    assert not covers((), ((), ()))
    assert not is_within(((0, 1),), (1, 1))
    assert relative(((2, 3),), ((1, 4),)) == (slice(1, 2),)
