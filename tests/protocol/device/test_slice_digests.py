"""Digests of slices: those of any partition of a tensor add up to the tensor's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.device import slice_digests
from protocol.device.digests import digests_of
from protocol.device.slice_digests import slice_sums
from protocol.weights.boxes import Box, dense_span, size_of, whole
from protocol.weights.digests import digest_of_sums, row_span, rows_of

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and disjoint boxes of all of it."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 7, 50, 130)), max_size=3)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(*box[dim]))
        sides = ((box[dim][0], cut), (cut, box[dim][1]))
        boxes += [(*box[:dim], side, *box[dim + 1 :]) for side in sides]
    return shape, [box for box in boxes if size_of(box)]


def added_up(tensor: torch.Tensor, boxes: list[Box], device: str = "cpu") -> int:
    shape, total = tensor.shape, torch.zeros(rows_of(tensor.nbytes), dtype=torch.int64)
    for box in boxes:
        first, end = (element * tensor.element_size() for element in dense_span(shape, box))
        part = tensor[tuple(slice(*side) for side in box)].to(device)
        low, high = row_span(first, end)
        total[low:high] += slice_sums(part, shape, box).cpu()
    return digest_of_sums(total.numpy(), tensor.nbytes)


@settings(deadline=None, max_examples=60)
@given(partitions(), st.sampled_from(DTYPES), st.sampled_from((8, 1000, 2 << 20)), st.integers(0, 99))
def test_digests_of_slices_add_up_to_that_of_the_tensor(
    case: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype, block_bytes: int, seed: int
) -> None:
    shape, boxes = case
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)
    before = slice_digests.BLOCK_BYTES["cpu"]
    slice_digests.BLOCK_BYTES["cpu"] = block_bytes
    try:
        assert added_up(tensor, boxes) == digests_of([tensor])[0]
    finally:
        slice_digests.BLOCK_BYTES["cpu"] = before


def test_digest_of_a_slice_depends_on_its_place() -> None:
    tensor = torch.arange(60.0).view(6, 10)
    rows = [((0, 3), (0, 10)), ((3, 6), (0, 10))]
    swapped = torch.cat([tensor[3:], tensor[:3]])
    assert added_up(tensor, rows) == digests_of([tensor])[0]
    assert added_up(swapped, rows) != digests_of([tensor])[0]


@pytest.mark.gpu
def test_sums_on_a_gpu_equal_those_on_the_host() -> None:
    for dtype in DTYPES:
        tensor = (torch.randn(700, 3001) * 50).to(dtype)
        for boxes in (
            [whole(tensor.shape)],
            [((0, 333), (0, 3001)), ((333, 700), (0, 3001))],
            [((0, 700), (0, 1500)), ((0, 700), (1500, 3001))],
        ):
            assert added_up(tensor, boxes, "cuda") == digests_of([tensor])[0]
