"""Digests of slices: those of any partition of a tensor add up to the tensor's own."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.device import slice_digests
from protocol.device.slice_digests import SliceSums, bits_of, digests_of
from protocol.weights.boxes import Box, size_of, whole
from protocol.weights.digests import digests_of_sums, rows_of

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
BEFORE = 3
"""Sums of other tensors before those of the one that is digested."""


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
    """The digest of a tensor from its slices; every second one lies in the tensor's own memory, and of every
    three two are copied, the second to a place that begins within a vector."""
    tensor = tensor.to(device)
    sums = SliceSums(BEFORE + rows_of(tensor.nbytes), tensor.device)
    copies = []
    for number, box in enumerate(boxes):
        part = tensor[tuple(slice(*side) for side in box)]
        memory = torch.zeros(part.numel() + 4, dtype=part.dtype, device=device)
        copy = memory[2 * (number % 3) :][: part.numel()].view(part.shape)
        is_copied = number % 3 < 2
        copies += [(part, copy, memory)] if is_copied else []
        given = part if number % 2 else part.contiguous()
        sums.add(given, tensor.shape, box, BEFORE, copy if is_copied else None)
    sums.launch()
    assert sums.is_launched
    for part, copy, memory in copies:
        assert torch.equal(bits_of(copy.contiguous()), bits_of(part.contiguous()))
        assert memory.count_nonzero() == part.count_nonzero()  # and no byte beside it
    found = sums.total.cpu().numpy()
    assert not found[:BEFORE].any()
    return digests_of_sums(found[BEFORE:], [tensor.nbytes])[0]


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
    for dtype, columns in itertools.product(DTYPES, (3001, 3000, 70000)):
        tensor = (torch.randn(300, columns) * 50).to(dtype)
        for boxes in (
            [whole(tensor.shape)],
            [((0, 133), (0, columns)), ((133, 300), (0, columns))],
            [((0, 300), (0, 1500)), ((0, 300), (1500, columns))],
            [((0, 300), (0, 1)), ((0, 300), (1, 2)), ((0, 300), (2, columns))],
        ):
            assert added_up(tensor, boxes, "cuda") == digests_of([tensor])[0], (dtype, columns, boxes)
