"""An export that yields tensors when a test allows it."""

import threading
from collections.abc import Iterable, Iterator

import torch

from protocol.errors import WeightError

WAIT_S = 60


class Making:
    """Tensors that come when they are let come. Once, as those of an export."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = list(tensors)
        self._allowed = threading.Semaphore(0)
        self.fails = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for named in self._tensors:
            assert self._allowed.acquire(timeout=WAIT_S)
            if self.fails:
                raise WeightError("it cannot be made")
            yield named

    def let(self, count: int | None = None) -> None:
        """Let so many more come, or all."""
        self._allowed.release(len(self._tensors) if count is None else count)
