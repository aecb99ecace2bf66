"""Digests of tensors where they lie: on the host at once, on a GPU on the current stream, so that the host
waits once for all.

For the trainer and the engines.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from protocol.weights.digests import ROW, digest, finish, fold, multipliers, rows_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size -> a dtype to look at bits through."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, which compare bit by bit."""
    return tensor.view(INTEGERS[tensor.element_size()])


ROWS = 512
"""Taken at a time where there is no Triton: 32 MiB of words and 64 MiB of products."""
TOGETHER_BYTES = 256 << 20
"""Of tensors on a GPU that are hashed by one kernel: each launch costs Python's time, which an engine's steps
need too."""
TOGETHER = 1024
"""Tensors, at most; a kernel's grid has no more than 65,535 in that direction."""

_tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


class Digests:
    """Of the bytes of dense tensors, in the order in which they are added.

    A tensor on a GPU is held until the kernel that reads it is queued. All is queued on one stream: that
    which is current at each call.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._known: dict[int, int] = {}
        """Number of a tensor -> its digest; of the others there are totals, or will be."""
        self._words: list[torch.Tensor] = []
        """Of tensors on a GPU that no kernel was queued for yet."""
        self._bytes = 0
        """Of those."""
        self._totals: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """What is queued after this must not overwrite it, or not before `launch` or `numbers`."""
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if not raw.is_cuda:
            self._known[len(self._sizes)] = digest(memoryview(raw.numpy().data))
        elif not len(raw):
            self._known[len(self._sizes)] = 0
        else:
            self._words.append(words_of(raw))
            self._bytes += len(raw)
        self._sizes.append(len(raw))
        if self._bytes >= TOGETHER_BYTES or len(self._words) == TOGETHER:
            self.launch()

    def numbers(self) -> list[int]:
        """Of all that was added; waits for the stream."""
        self.launch()
        totals = iter(torch.cat(self._totals).tolist() if self._totals else [])
        return [
            self._known[i] if i in self._known else finish(next(totals), size)
            for i, size in enumerate(self._sizes)
        ]

    def launch(self) -> None:
        """Queue what is not queued yet on the current stream."""
        words, self._words, self._bytes = self._words, [], 0
        if words:
            self._totals.append(fold_words(words))


def digests_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of dense tensors anywhere."""
    found = Digests()
    for tensor in tensors:
        found.add(tensor)
    return found.numbers()


def words_of(raw: torch.Tensor) -> torch.Tensor:
    """[n] uint8 -> [(n + 3) / 4] int32, zeros behind them."""
    if raw.data_ptr() % 4:
        raw = raw.clone()
    if len(raw) % 4:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4))
    return raw.view(torch.int32)


def fold_words(words: Sequence[torch.Tensor]) -> torch.Tensor:
    """`protocol.weights.digests.fold` of tensors [any > 0] int32 on one device -> [n] int64 there."""
    device = words[0].device
    inner, outer = _multipliers(device, rows_of(max(tensor.nbytes for tensor in words)))
    if device.type == "cuda" and _has_triton():
        from protocol.device import triton_digests

        return triton_digests.fold(words, inner, outer)
    return torch.stack([fold(tensor, inner, outer, torch.int32, _row_sums) for tensor in words])


def _row_sums(rows: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    return torch.cat([(part * inner).sum(1) for part in rows.split(ROWS)])


def _multipliers(device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    known = _tables.get(device)
    if known is None or len(known[1]) < 2 * rows:
        outer = multipliers(1, max(2 * rows, 1 << 16))
        known = _tables[device] = (
            torch.from_numpy(multipliers(0, ROW)).to(device),
            torch.from_numpy(outer).to(device),
        )
    return known


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
