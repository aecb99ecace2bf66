"""Digests, and optionally copies, many slices by one Triton kernel; imported on GPUs only.

The kernel reads the bytes once, whole tensors at memory bandwidth.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from protocol.weights.digests import ROW
from protocol.weights.strips import WORD_BYTES

BLOCK = 2048
"""Words per loop iteration of a program."""
VECTOR_BYTES = 16
"""Bytes per vectorized load, used if all slices are aligned to this size."""


@triton.jit
def _strips(  # type: ignore[no-untyped-def]
    table,
    inner,
    sums,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    COPY: tl.constexpr,
):
    row, strip = tl.program_id(0).to(tl.int64), table + 9 * tl.program_id(1)
    if row < tl.load(strip + 7):
        words = tl.load(strip).to(tl.pointer_type(tl.int32))
        start, runs, width = tl.load(strip + 1), tl.load(strip + 2), tl.load(strip + 3)
        pitch, source_pitch = tl.load(strip + 4), tl.load(strip + 5)
        copy = tl.load(strip + 8).to(tl.pointer_type(tl.int32))
        behind = (start // ROW + row) * ROW - start  # the row's first word; negative in the first row
        total = tl.zeros([BLOCK], tl.int64)
        if (runs == 1) & (behind >= 0) & (behind + ROW <= width):  # loads without a mask can be vectorized
            dense, dense_copy = words + behind, copy + behind
            if ALIGNED:
                dense, dense_copy = tl.multiple_of(dense, 16), tl.multiple_of(dense_copy, 16)
            for first in range(0, ROW, BLOCK):
                column = first + tl.arange(0, BLOCK)
                word = tl.load(dense + column)
                if COPY:
                    tl.store(dense_copy + column, word)
                total += word.to(tl.int64) * tl.load(inner + column)
        else:
            run = tl.maximum(behind, 0) // pitch
            offset = (behind - run * pitch).to(tl.int32)
            pitch_32 = pitch.to(tl.int32)
            for first in range(0, ROW, BLOCK):
                column = first + tl.arange(0, BLOCK)
                place = offset + column
                later = tl.maximum(place, 0) // pitch_32
                inside = place - later * pitch_32
                mask = (place >= 0) & (inside < width) & (run + later < runs)
                word = tl.load(words + (run + later) * source_pitch + inside, mask=mask, other=0)
                if COPY:
                    tl.store(copy + (run + later) * width + inside, word, mask=mask)
                total += word.to(tl.int64) * tl.load(inner + column)
        tl.atomic_add(sums + tl.load(strip + 6) + row, tl.sum(total, 0))


def add_strips(
    strips: Sequence[tuple[int, ...]], inner: torch.Tensor, sums: torch.Tensor, *, is_copied: bool
) -> None:
    """Add the sums h of slices to the sums of their rows.

    Args:
        strips: one tuple per strip: (address of the first word, start, runs, width, pitch, source_pitch,
            index of the sum of the first row, rows, address of the copy); see
            `protocol.weights.strips.Strip`.
        inner: [ROW] int64 on the GPU of the slices.
        sums: int64 on the same GPU.
        is_copied: whether the kernel also copies the strips, with their runs concatenated.
    """
    table = torch.from_numpy(np.array(strips, np.int64)).to(sums.device, non_blocking=True)
    rows = max(strip[7] for strip in strips)
    addresses = [(strip[0], strip[8]) if is_copied else strip[:1] for strip in strips]
    aligned = not any(
        (address - WORD_BYTES * strip[1]) % VECTOR_BYTES
        for strip, places in zip(strips, addresses, strict=True)
        for address in places
    )
    grid = (rows, len(strips))
    _strips[grid](table, inner, sums, ROW=ROW, BLOCK=BLOCK, ALIGNED=aligned, COPY=is_copied)
