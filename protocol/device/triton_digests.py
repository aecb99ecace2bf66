"""`protocol.weights.digests.fold` of many tensors by one Triton kernel: one pass over the bytes at the
memory's speed. Imported on GPUs only."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from protocol.weights.digests import ROW

BLOCK = 2048
VECTOR_BYTES = 16
"""What a thread loads at once where all tensors are aligned to it."""


@triton.jit
def _fold(table, inner, outer, totals, ROW: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    row, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    left = tl.load(table + 2 * tensor + 1) - row * ROW
    if left > 0:
        words = tl.load(table + 2 * tensor).to(tl.pointer_type(tl.int32)) + row * ROW
        if ALIGNED:
            words = tl.multiple_of(words, 16)
        sums = tl.zeros([BLOCK], tl.int64)
        if left >= ROW:  # without a mask a thread can load many bytes at once
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


def fold(words: Sequence[torch.Tensor], inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """n tensors [any > 0] int32 on a GPU -> [n] int64 there; the tables are those of
    `protocol.weights.digests.fold`."""
    facts = [(tensor.data_ptr(), len(tensor)) for tensor in words]
    table = torch.tensor(facts, dtype=torch.int64).to(inner.device, non_blocking=True)
    totals = torch.zeros(len(words), dtype=torch.int64, device=inner.device)
    rows = -(-max(count for _, count in facts) // ROW)
    aligned = not any(pointer % VECTOR_BYTES for pointer, _ in facts)
    _fold[(rows, len(words))](table, inner, outer, totals, ROW=ROW, BLOCK=BLOCK, ALIGNED=aligned)
    return totals
