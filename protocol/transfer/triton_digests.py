"""`protocol.digests.fold` as one Triton kernel: one pass over the bytes at the speed of the memory. Imported on GPUs only."""

import torch
import triton
import triton.language as tl

from protocol.digests import ROW

BLOCK = 2048


@triton.jit
def _fold(words, inner, outer, total, count, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, ROW, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = row * ROW + column
        word = tl.load(words + place, mask=place < count, other=0)
        sums += word.to(tl.int64) * tl.load(inner + column)
    h = tl.sum(sums, 0)
    low = ((h << 32) >> 32) * tl.load(outer + 2 * row)
    tl.atomic_add(total, low + (h >> 32) * tl.load(outer + 2 * row + 1))


def fold(words: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """[n] int32 on a GPU -> 0-dim int64 there; the tables are those of `protocol.digests.fold`."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    _fold[(-(-len(words) // ROW),)](words, inner, outer, total, len(words), ROW=ROW, BLOCK=BLOCK)
    return total
