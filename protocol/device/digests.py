"""Digests tensors where they lie, for the trainer and the engines.

Tensors in host memory are digested at once, those on a GPU by kernels on the current stream, so that the host
waits only once.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from protocol.weights.digests import ROW, digest, finish, fold, multipliers, rows_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per element -> an integer dtype of that size."""
ROWS = 512
"""Rows folded at a time without Triton: 32 MiB of words and 64 MiB of products."""
BATCH_BYTES = 256 << 20
"""Bytes of GPU tensors digested by one kernel: each launch takes Python's time, which an engine's steps
need."""
BATCH_TENSORS = 1024
"""Tensors digested by one kernel, at most; a grid has at most 65,535 programs in that dimension."""

_tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
"""Device -> (INNER, OUTER), grown when a larger tensor needs it."""


class Digests:
    """Digests of dense tensors, in the order in which they are added.

    A tensor on a GPU is referenced until the kernel that reads it is queued. Kernels are queued on the stream
    that is current at each call, which must always be the same.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """Bytes of each tensor."""
        self._known: dict[int, int] = {}
        """Index -> digest, of tensors in host memory and empty ones."""
        self._words: list[torch.Tensor] = []
        """Words of the GPU tensors for which no kernel is queued yet."""
        self._bytes = 0
        """Bytes of `_words`."""
        self._totals: list[torch.Tensor] = []
        """int64 on the GPU, from `fold`, of the GPU tensors in order."""

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor; work that overwrites it must not be queued before `launch` or `numbers`."""
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if not raw.is_cuda:
            self._known[len(self._sizes)] = digest(memoryview(raw.numpy().data))
        elif not len(raw):
            self._known[len(self._sizes)] = 0
        else:
            self._words.append(words_of(raw))
            self._bytes += len(raw)
        self._sizes.append(len(raw))
        if self._bytes >= BATCH_BYTES or len(self._words) == BATCH_TENSORS:
            self.launch()

    def numbers(self) -> list[int]:
        """Return the digests of all tensors; waits for the stream."""
        self.launch()
        totals = iter(torch.cat(self._totals).tolist() if self._totals else [])
        return [
            self._known[i] if i in self._known else finish(next(totals), size)
            for i, size in enumerate(self._sizes)
        ]

    def launch(self) -> None:
        """Queue the kernels that are not queued yet, on the current stream."""
        words, self._words, self._bytes = self._words, [], 0
        if words:
            self._totals.append(fold_words(words))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the memory as integers, which compare bit by bit."""
    return tensor.view(INTEGERS[tensor.element_size()])


def digests_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digests of dense tensors on any device."""
    found = Digests()
    for tensor in tensors:
        found.add(tensor)
    return found.numbers()


def words_of(raw: torch.Tensor) -> torch.Tensor:
    """Return the words of uint8 [n], padded with zeros: int32 [ceil(n / 4)]."""
    if raw.data_ptr() % 4:
        raw = raw.clone()
    if len(raw) % 4:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4))
    return raw.view(torch.int32)


def fold_words(words: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `protocol.weights.digests.fold` of n tensors on one device.

    Args:
        words: n tensors int32 [any number above 0].

    Returns:
        int64 [n] on that device.
    """
    device = words[0].device
    inner, outer = _multipliers(device, rows_of(max(tensor.nbytes for tensor in words)))
    if device.type == "cuda" and has_triton():
        from protocol.device import triton_digests

        return triton_digests.fold(words, inner, outer)
    return torch.stack([fold(tensor, inner, outer, torch.int32, _row_sums) for tensor in words])


def _row_sums(rows: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    return torch.cat([(part * inner).sum(1) for part in rows.split(ROWS)])


def _multipliers(device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = _tables.get(device)
    if table is None or len(table[1]) < 2 * rows:
        outer = multipliers(1, max(2 * rows, 1 << 16))
        table = _tables[device] = (
            torch.from_numpy(multipliers(0, ROW)).to(device),
            torch.from_numpy(outer).to(device),
        )
    return table


def inner_on(device: torch.device) -> torch.Tensor:
    """Return the multipliers of a row on a device, int64 [ROW]."""
    return _multipliers(device, 1)[0]


@cache
def has_triton() -> bool:
    """Return whether there is Triton here."""
    return importlib.util.find_spec("triton") is not None
