"""Digests slices at their place in a tensor, on any device, so that the sums of disjoint slices add up."""

from collections.abc import Iterator, Sequence

import torch

from protocol.device.digests import BATCH_BYTES, BATCH_TENSORS, ROWS, has_triton, inner_on
from protocol.weights.boxes import Box, dense_blocks, dense_span, relative, size_of
from protocol.weights.digests import INNER, ROW, row_span
from protocol.weights.digests import row_sums as host_row_sums
from protocol.weights.strips import WORD_BYTES, strips_of

ROW_BYTES = 4 * ROW
BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
"""Bytes of the tensor that are laid out at a time, with zeros where the slice is not."""


class SliceSums:
    """Array that adds up the sums h of many slices, each at its place.

    Slices on a GPU are added by few kernels, on the stream that is current at each call, which must always be
    the same: launching one for each slice takes Python's time, which an engine's steps need.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """Begin with `rows` sums of zero on the device of the slices."""
        self.total = torch.zeros(rows, dtype=torch.int64, device=device)
        """int64 [rows], complete after `launch`."""
        self._strips: list[tuple[int, ...]] = []
        """Strips of slices for which no kernel is queued yet, as `triton_digests.add_strips` takes them."""
        self._slices: list[torch.Tensor] = []
        """These slices, so that their memory stays."""
        self._bytes = 0
        """Bytes of these slices."""

    def add(self, tensor: torch.Tensor, shape: Sequence[int], box: Box, first: int) -> None:
        """Add a slice; work that overwrites it must not be queued before `launch`.

        Args:
            tensor: the elements of `box`, in its shape, dense or not.
            shape: the whole tensor's shape.
            box: the slice's place in it.
            first: index of the sum of the tensor's first row; below 0 if there are sums of later rows only.
        """
        strips = None
        if tensor.is_cuda and has_triton() and tensor.data_ptr() % WORD_BYTES == 0:
            strips = strips_of(tuple(shape), box, tensor.stride(), tensor.element_size())
        if strips is None:
            low = first + _rows_of(shape, box, tensor.element_size())[0]
            sums = slice_sums(tensor, shape, box)
            self.total[low : low + len(sums)] += sums
            return
        address = tensor.data_ptr()
        for strip in strips:
            source = address + WORD_BYTES * strip.source
            self._strips.append((source, *strip[1:], first + strip.start // ROW, strip.rows))
        self._slices.append(tensor)
        self._bytes += tensor.nbytes
        if self._bytes >= BATCH_BYTES or len(self._strips) >= BATCH_TENSORS:
            self.launch()

    def launch(self) -> None:
        """Queue the kernel of the slices that were added since the last call."""
        if self._strips:
            from protocol.device import triton_digests

            triton_digests.add_strips(self._strips, inner_on(self.total.device), self.total)
        # Only now: the kernel's table would otherwise be written into the memory of a slice.
        self._strips, self._slices, self._bytes = [], [], 0


def slice_sums(tensor: torch.Tensor, shape: Sequence[int], box: Box) -> torch.Tensor:
    """Return the sums h of a slice in the rows of the whole tensor, on the slice's device.

    Args:
        tensor: the elements of `box`, in its shape, dense or not.
        shape: the whole tensor's shape.
        box: the slice's place in it.

    Returns:
        int64 [rows of `protocol.weights.slices.sum_span`].
    """
    first, end = _rows_of(shape, box, tensor.element_size())
    sums = torch.zeros(end - first, dtype=torch.int64, device=tensor.device)
    for low, rows in _rows(tensor, shape, box):
        sums[low - first : low - first + len(rows)] += _row_sums(rows)
    return sums


def _rows_of(shape: Sequence[int], box: Box, itemsize: int) -> tuple[int, int]:
    """Return the rows (first, after the last) of the tensor that hold a slice."""
    start, stop = dense_span(shape, box) if size_of(box) else (0, 0)
    return row_span(start * itemsize, stop * itemsize)


def _rows(tensor: torch.Tensor, shape: Sequence[int], box: Box) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, int32 [r, ROW]): rows of the tensor with parts of the slice, which add up to it."""
    itemsize = tensor.element_size()
    start, end = (element * itemsize for element in dense_span(shape, box))
    if end - start != tensor.nbytes or not tensor.is_contiguous() or (start | tensor.data_ptr()) % 4:
        for block in dense_blocks(shape, box, BLOCK_BYTES[tensor.device.type] // itemsize):
            yield _laid_out(tensor[relative(block, box)], shape, block)
        return
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    head = min(-start % ROW_BYTES, len(raw))
    full = (len(raw) - head) // ROW_BYTES * ROW_BYTES
    if head:
        yield _padded(raw[:head], start)
    if full:
        yield (start + head) // ROW_BYTES, raw[head : head + full].view(torch.int32).view(-1, ROW)
    if head + full < len(raw):
        yield _padded(raw[head + full :], start + head + full)


def _padded(raw: torch.Tensor, start: int) -> tuple[int, torch.Tensor]:
    """Return the row that holds bytes, with zeros around them: (row, int32 [1, ROW])."""
    row, offset = divmod(start, ROW_BYTES)
    memory = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=raw.device)
    memory[offset : offset + len(raw)] = raw
    return row, memory.view(torch.int32).view(1, ROW)


def _laid_out(part: torch.Tensor, shape: Sequence[int], block: Box) -> tuple[int, torch.Tensor]:
    """Return the rows that hold a block, with zeros around it: (first row, int32 [r, ROW])."""
    itemsize = part.element_size()
    start, end = (element * itemsize for element in dense_span(shape, block))
    low, high = row_span(start, end)
    memory = torch.zeros((high - low) * ROW_BYTES, dtype=torch.uint8, device=part.device)
    dense = memory[start - low * ROW_BYTES : end - low * ROW_BYTES].view(part.dtype)
    lead = next((dim for dim, (a, b) in enumerate(block) if b - a > 1), len(block))
    inner = dense.view(-1, *shape[lead + 1 :]) if lead < len(block) else dense
    index = tuple(slice(a, b) for a, b in block[lead + 1 :])
    target = inner[(slice(None), *index)]
    target.copy_(part.reshape(target.shape))
    return low, memory.view(torch.int32).view(-1, ROW)


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    if not rows.is_cuda:
        return torch.from_numpy(host_row_sums(rows.numpy(), INNER))
    inner = inner_on(rows.device)
    if has_triton():
        from protocol.device import triton_digests

        return triton_digests.row_sums(rows, inner)
    return torch.cat([(part * inner).sum(1) for part in rows.split(ROWS)])
