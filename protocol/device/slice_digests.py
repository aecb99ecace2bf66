"""Digests tensors, or slices of tensors, on any device; the sums of disjoint slices add up.

Host tensors are digested immediately. GPU tensors are digested by kernels on the current stream, so the host
waits only once.
"""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch

from protocol.weights.boxes import Box, dense_blocks, dense_span, relative, size_of, whole
from protocol.weights.digests import INNER, ROW, digest, digests_of_sums, row_span, rows_of
from protocol.weights.digests import row_sums as host_row_sums
from protocol.weights.strips import WORD_BYTES, Strip, strips_of

ROW_BYTES = WORD_BYTES * ROW
BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
"""Device type -> bytes of the tensor that are laid out at a time, with zeros outside the slice."""
ROWS = 512
"""Rows per batch when digesting without Triton: 32 MiB of words and 64 MiB of products."""
BATCH_BYTES = 256 << 20
"""Bytes of GPU slices per kernel. Each launch costs Python time, which delays the engine's steps."""
BATCH_TENSORS = 1024
"""Maximum number of slices per kernel; a grid has at most 65,535 programs in this dimension."""

Words = tuple[int, int, torch.Tensor]
"""(row, column of the first word, int32 [r, k] words of a tensor)."""


class SliceSums:
    """Sums h of many slices, accumulated in one array; optionally copies the slices in the same pass.

    GPU slices are batched into few kernels, because each launch costs Python time that delays the engine's
    steps. Kernels run on the current stream, which must be the same at every call.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """Create `rows` sums of zero on the device of the slices."""
        self.total = torch.zeros(rows, dtype=torch.int64, device=device)
        """int64 [rows], complete after `launch`."""
        self._strips: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
        """Arguments of `triton_digests.add_strips` for strips without a queued kernel: strips to digest only,
        and strips to digest and copy."""
        self._slices: list[torch.Tensor] = []
        """Slices of `_strips`; the references keep their memory alive."""
        self._bytes = 0

    @property
    def is_launched(self) -> bool:
        """Whether kernels are queued for all added slices."""
        return not self._slices

    def add(
        self,
        tensor: torch.Tensor,
        shape: Sequence[int],
        box: Box,
        first: int,
        copy: torch.Tensor | None = None,
    ) -> None:
        """Add a slice; the slice must not be overwritten by work queued before `launch`.

        Args:
            tensor: elements of `box`, in its shape, contiguous or not.
            box: position of the slice in the whole tensor.
            first: index of the sum of the whole tensor's first row; negative if the array lacks the sums of
                earlier rows.
            copy: contiguous destination in the shape of the slice, complete after `launch`. If its dtype
                differs from the slice's, the copy is digested instead of the slice.
        """
        strips = _strips_of(tensor, shape, box)
        if copy is not None and (strips is None or not _can_copy_words(copy, tensor)):
            copy.copy_(tensor)
            tensor, strips = copy, _strips_of(copy, shape, box)
            copy = None
        if strips is None:
            for row, column, words in _rows(tensor, shape, box):
                self.total[first + row : first + row + len(words)] += _row_sums(words, column)
            return
        source, target = tensor.data_ptr(), 0 if copy is None else copy.data_ptr()
        for strip in strips:
            start = first + strip.start // ROW
            facts = (source + WORD_BYTES * strip.source, *strip[1:], start, strip.rows, target)
            self._strips[copy is not None].append(facts)
            target += WORD_BYTES * strip.runs * strip.width
        self._slices += [tensor] if copy is None else [tensor, copy]
        self._bytes += tensor.nbytes
        if self._bytes >= BATCH_BYTES or sum(map(len, self._strips)) >= BATCH_TENSORS:
            self.launch()

    def launch(self) -> None:
        """Queue the kernels for all slices added since the last call."""
        if self._slices:
            from protocol.device import triton_digests

            for strips, is_copied in zip(self._strips, (False, True), strict=True):
                if strips:
                    inner = inner_on(self.total.device)
                    triton_digests.add_strips(strips, inner, self.total, is_copied=is_copied)
        # Release the slices last: otherwise the kernel's table could reuse their memory.
        self._strips, self._slices, self._bytes = ([], []), [], 0


@cache
def inner_on(device: torch.device) -> torch.Tensor:
    """Return the multipliers of a row on a device, int64 [ROW]."""
    return torch.from_numpy(INNER).to(device)


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether Triton is installed and supports the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _strips_of(tensor: torch.Tensor, shape: Sequence[int], box: Box) -> tuple[Strip, ...] | None:
    """Return the strips of a slice that a kernel can read; None if the slice must be laid out first."""
    if not has_kernels(tensor.device) or tensor.data_ptr() % WORD_BYTES:
        return None
    return strips_of(tuple(shape), box, tensor.stride(), tensor.element_size())


def _can_copy_words(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a kernel can copy a slice to `copy` word by word."""
    alike = (copy.device, copy.dtype) == (tensor.device, tensor.dtype)
    return alike and copy.is_contiguous() and copy.data_ptr() % WORD_BYTES == 0


def _rows(tensor: torch.Tensor, shape: Sequence[int], box: Box) -> Iterator[Words]:
    """Yield words of the tensor that add up to the slice."""
    if not size_of(box):
        return
    itemsize = tensor.element_size()
    start, end = (element * itemsize for element in dense_span(shape, box))
    is_dense = end - start == tensor.nbytes and tensor.is_contiguous()
    if not is_dense or (start | end | tensor.data_ptr()) % WORD_BYTES:
        for block in dense_blocks(shape, box, BLOCK_BYTES[tensor.device.type] // itemsize):
            yield _zero_padded_rows(tensor[relative(block, box)], shape, block)
        return
    words = tensor.detach().reshape(-1).view(torch.int32)
    row, column = divmod(start // WORD_BYTES, ROW)
    if column:
        head, words = words[: ROW - column], words[ROW - column :]
        yield row, column, head.view(1, -1)
        row += 1
    full = len(words) // ROW
    if full:
        yield row, 0, words[: full * ROW].view(full, ROW)
    if len(words) > full * ROW:
        yield row + full, 0, words[full * ROW :].view(1, -1)


def _zero_padded_rows(part: torch.Tensor, shape: Sequence[int], block: Box) -> Words:
    """Return the rows that contain a block, with zeros outside the block."""
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
    return low, 0, memory.view(torch.int32).view(-1, ROW)


def _row_sums(words: torch.Tensor, column: int) -> torch.Tensor:
    """Return the sums of words [r, k] int32 that start at `column` of their rows: int64 [r]."""
    end = column + words.shape[1]
    if not words.is_cuda:
        rows = np.asarray(np.from_dlpack(words), np.int32)
        return torch.from_numpy(host_row_sums(rows, INNER[column:end]))
    inner = inner_on(words.device)[column:end]
    return torch.cat([(part * inner).sum(1) for part in words.split(ROWS)])


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> integer dtype of that size."""


class Digests:
    """Digests of dense tensors, in the order of `add`.

    A GPU tensor is referenced until its kernel is queued. Kernels run on the current stream, which must be
    the same at every call.
    """

    def __init__(self) -> None:
        self._digests: list[int] = []
        """Digest of each tensor; 0 for GPU tensors until `numbers`."""
        self._on_gpu: dict[int, int] = {}
        """Index of a GPU tensor -> size in bytes."""
        self._pending: list[torch.Tensor] = []
        """GPU tensors without a queued kernel, of `_bytes` bytes."""
        self._bytes = 0
        self._sums: list[torch.Tensor] = []
        """Row sums of the GPU tensors, int64 on the GPU."""

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor; the tensor must not be overwritten by work queued before `launch` or `numbers`."""
        dense = tensor.detach().contiguous()
        if not dense.is_cuda:
            # `Tensor.numpy` would pin the storage, which a sleeping engine resizes to release its memory
            self._digests.append(digest(np.from_dlpack(dense.reshape(-1).view(torch.uint8)).data))
            return
        self._on_gpu[len(self._digests)] = dense.nbytes
        self._digests.append(0)
        self._pending.append(dense)
        self._bytes += dense.nbytes
        if self._bytes >= BATCH_BYTES or len(self._pending) == BATCH_TENSORS:
            self.launch()

    def numbers(self) -> list[int]:
        """Return the digests of all tensors; waits for the stream."""
        self.launch()
        if self._sums:
            sums = torch.cat(self._sums).cpu().numpy()
            found = digests_of_sums(sums, list(self._on_gpu.values()))
            for index, number in zip(self._on_gpu, found, strict=True):
                self._digests[index] = number
        return self._digests

    def launch(self) -> None:
        """Queue the kernels of all waiting tensors on the current stream."""
        waiting, self._pending, self._bytes = self._pending, [], 0
        if waiting:
            sums = SliceSums(sum(rows_of(tensor.nbytes) for tensor in waiting), waiting[0].device)
            first = 0
            for tensor in waiting:
                sums.add(tensor, tensor.shape, whole(tensor.shape), first)
                first += rows_of(tensor.nbytes)
            sums.launch()
            self._sums.append(sums.total)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as integers, which compare bit by bit."""
    return tensor.view(INTEGERS[tensor.element_size()])


def digests_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digests of dense tensors on any device."""
    found = Digests()
    for tensor in tensors:
        found.add(tensor)
    return found.numbers()
