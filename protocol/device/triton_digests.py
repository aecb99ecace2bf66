"""Digests many tensors, or many slices, by one Triton kernel each; imported on GPUs only.

One pass over the bytes, for whole tensors at the bandwidth of the memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from protocol.weights.digests import ROW
from protocol.weights.strips import WORD_BYTES

BLOCK = 2048
"""Words per iteration of a program."""
VECTOR_BYTES = 16
"""Bytes that a thread loads at once if all tensors are aligned to them."""


@triton.jit
def _fold(table, inner, outer, totals, ROW: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    row, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    left = tl.load(table + 2 * tensor + 1) - row * ROW
    if left > 0:
        words = tl.load(table + 2 * tensor).to(tl.pointer_type(tl.int32)) + row * ROW
        if ALIGNED:
            words = tl.multiple_of(words, 16)
        sums = tl.zeros([BLOCK], tl.int64)
        if left >= ROW:  # loads without a mask can be vectorized
            for start in range(0, ROW, BLOCK):
                column = start + tl.arange(0, BLOCK)
                sums += tl.load(words + column).to(tl.int64) * tl.load(inner + column)
        else:
            for start in range(0, ROW, BLOCK):
                column = start + tl.arange(0, BLOCK)
                word = tl.load(words + column, mask=column < left, other=0)
                sums += word.to(tl.int64) * tl.load(inner + column)
        h = tl.sum(sums, 0)
        low = ((h << 32) >> 32) * tl.load(outer + 2 * row)
        tl.atomic_add(totals + tensor, low + (h >> 32) * tl.load(outer + 2 * row + 1))


@triton.jit
def _row_sums(words, inner, sums, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, ROW, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(words + row * ROW + column).to(tl.int64) * tl.load(inner + column)
    tl.store(sums + row, tl.sum(total, 0))


@triton.jit
def _strips(table, inner, sums, ROW: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    row, strip = tl.program_id(0).to(tl.int64), table + 8 * tl.program_id(1)
    if row < tl.load(strip + 7):
        words = tl.load(strip).to(tl.pointer_type(tl.int32))
        start, runs, width = tl.load(strip + 1), tl.load(strip + 2), tl.load(strip + 3)
        pitch, source_pitch = tl.load(strip + 4), tl.load(strip + 5)
        behind = (start // ROW + row) * ROW - start  # the row's first word; negative in the first row
        total = tl.zeros([BLOCK], tl.int64)
        if (runs == 1) & (behind >= 0) & (behind + ROW <= width):  # loads without a mask can be vectorized
            dense = words + behind
            if ALIGNED:
                dense = tl.multiple_of(dense, 16)
            for first in range(0, ROW, BLOCK):
                column = first + tl.arange(0, BLOCK)
                total += tl.load(dense + column).to(tl.int64) * tl.load(inner + column)
        else:
            run = tl.maximum(behind, 0) // pitch
            offset = (behind - run * pitch).to(tl.int32)
            pitch_32 = pitch.to(tl.int32)
            for first in range(0, ROW, BLOCK):
                column = first + tl.arange(0, BLOCK)
                word = offset + column
                later = tl.maximum(word, 0) // pitch_32
                inside = word - later * pitch_32
                mask = (word >= 0) & (inside < width) & (run + later < runs)
                found = tl.load(words + (run + later) * source_pitch + inside, mask=mask, other=0)
                total += found.to(tl.int64) * tl.load(inner + column)
        tl.atomic_add(sums + tl.load(strip + 6) + row, tl.sum(total, 0))


def row_sums(words: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Return the sums h of rows.

    Args:
        words: [rows, ROW] int32 on a GPU, dense.
        inner: [ROW] int64 on that GPU.

    Returns:
        int64 [rows] on that GPU.
    """
    sums = torch.empty(len(words), dtype=torch.int64, device=words.device)
    _row_sums[(len(words),)](words, inner, sums, ROW=ROW, BLOCK=BLOCK)
    return sums


def fold(words: Sequence[torch.Tensor], inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Return `protocol.weights.digests.fold` of each tensor.

    Args:
        words: n tensors on a GPU, int32 [any number above 0].
        inner: [ROW] int64 on that GPU, as in `protocol.weights.digests.fold`.
        outer: [at least 2 * rows] int64 on that GPU, as in `protocol.weights.digests.fold`.

    Returns:
        int64 [n] on that GPU.
    """
    facts = [(tensor.data_ptr(), len(tensor)) for tensor in words]
    table = torch.tensor(facts, dtype=torch.int64).to(inner.device, non_blocking=True)
    totals = torch.zeros(len(words), dtype=torch.int64, device=inner.device)
    rows = -(-max(count for _, count in facts) // ROW)
    aligned = not any(pointer % VECTOR_BYTES for pointer, _ in facts)
    _fold[(rows, len(words))](table, inner, outer, totals, ROW=ROW, BLOCK=BLOCK, ALIGNED=aligned)
    return totals


def add_strips(strips: Sequence[tuple[int, ...]], inner: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the sums h of slices to the sums of their rows.

    Args:
        strips: of each (address of its first word, start, runs, width, pitch, source_pitch, index of the sum
            of its first row, rows), see `protocol.weights.strips.Strip`.
        inner: [ROW] int64 on the GPU of the slices.
        sums: int64 on that GPU.
    """
    table = torch.tensor(strips, dtype=torch.int64).to(sums.device, non_blocking=True)
    rows = max(strip[-1] for strip in strips)
    aligned = not any((address - WORD_BYTES * start) % VECTOR_BYTES for address, start, *_ in strips)
    _strips[(rows, len(strips))](table, inner, sums, ROW=ROW, BLOCK=BLOCK, ALIGNED=aligned)
