"""Digests of tensors where they lie: on the host at once, on a GPU on the current stream, so that the host waits once for all.

For the trainer and the engines.
"""

import importlib.util
from collections.abc import Sequence

import torch

from protocol.digests import ROW, digest, finish, fold, multipliers, rows_of

ROWS = 512
"""Taken at a time where there is no Triton: 32 MiB of words and 64 MiB of products."""

_tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def digest_tensor(tensor: torch.Tensor) -> int | torch.Tensor:
    """The digest of a dense tensor's bytes; of one on a GPU a number there, for `collect`."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not raw.is_cuda:
        return digest(memoryview(raw.numpy().data))
    return fold_bytes(raw) if len(raw) else 0


def fold_bytes(raw: torch.Tensor) -> torch.Tensor:
    """`protocol.digests.fold` of [n] uint8, n > 0, on any device -> 0-dim int64 there."""
    if raw.data_ptr() % 4:
        raw = raw.clone()
    if len(raw) % 4:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4))
    words = raw.view(torch.int32)
    inner, outer = _multipliers(raw.device, rows_of(len(raw)))
    if raw.is_cuda and importlib.util.find_spec("triton"):
        from protocol.transfer import triton_digests

        return triton_digests.fold(words, inner, outer)
    return fold(words, inner, outer, torch.int32, _row_sums)  # type: ignore[no-any-return]


def collect(found: Sequence[int | torch.Tensor], sizes: Sequence[int]) -> list[int]:
    """The numbers that `digest_tensor` returned for tensors of `sizes` bytes; waits for the stream."""
    totals = [total for total in found if isinstance(total, torch.Tensor)]
    numbers = iter(torch.stack(totals).tolist() if totals else [])
    return [finish(next(numbers), size) if isinstance(total, torch.Tensor) else total for total, size in zip(found, sizes, strict=True)]


def _row_sums(rows: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    return torch.cat([(part * inner).sum(1) for part in rows.split(ROWS)])


def _multipliers(device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    known = _tables.get(device)
    if known is None or len(known[1]) < 2 * rows:
        outer = multipliers(1, max(2 * rows, 1 << 16))
        known = _tables[device] = (torch.from_numpy(multipliers(0, ROW)).to(device), torch.from_numpy(outer).to(device))
    return known
