"""Exports the tensors of a version while the optimizer step is still computing other tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protocol.errors import WeightError

if TYPE_CHECKING:  # processes that read settings import the registry, which must not import torch
    import torch

Tensors = Iterator["tuple[str, torch.Tensor]"]
"""(Hugging Face name, tensor) in the order of export."""


class EarlyExport:
    """Parameters of a step that have their final values. One thread runs the step, another thread exports.

    A step with a skipped update, or that fails before the last update, starts no export. A step that fails
    later ends the export with an error, so the version is not published.
    """

    def __init__(
        self,
        begin: Callable[[Tensors], None] | None = None,
        export: Callable[[EarlyExport], Tensors] | None = None,
        updates: int = 1,
    ) -> None:
        """Prepare for one step.

        Args:
            begin: called in the thread of the step before its last update, with an iterator that yields each
                tensor of the new version when the tensor is final. Another thread must consume the iterator.
                None: no early export.
            export: returns the iterator, which waits for each tensor by `await_final`.
            updates: number of updates in the step, each of which may be skipped.
        """
        self._begin, self._export, self._remaining_updates = begin, export, updates
        self._changed = threading.Condition()
        self._final: dict[int, torch.cuda.Event | None] = {}
        """Identity of a final parameter -> event after which it is final on a GPU, or None."""
        self._started = self._done = self._failed = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the step within the block; then all tensors are final, or the export fails if it raises."""
        try:
            yield
        except BaseException:
            self._end(failed=True)
            raise
        self._end(failed=False)

    def begin(self) -> None:
        """Record that an update can no longer be skipped; the last update starts the export.

        Raises:
            RuntimeError: an export is running, and this update would change its parameters.
        """
        if self._begin is None or self._export is None:
            return
        if self._started:
            raise RuntimeError("another update would change parameters that are being published")
        self._remaining_updates -= 1
        if not self._remaining_updates:
            self._started = True
            self._begin(self._export(self))

    def add(self, parameters: Iterable[torch.Tensor], event: torch.cuda.Event | None) -> None:
        """Record that an update has computed parameters; GPU parameters are final after the event."""
        if self._started:
            with self._changed:
                self._final |= {id(parameter): event for parameter in parameters}
                self._changed.notify_all()

    def await_final(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter is final, for work on the current stream.

        Parameters that the optimizer does not step are final when the step ends, which ends every wait.

        Raises:
            WeightError: the step has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._failed or id(parameter) in self._final)
            if self._failed:
                raise WeightError("the optimizer's step has failed")
            event = self._final.get(id(parameter))
        if event is not None:
            event.wait()

    def _end(self, *, failed: bool) -> None:
        with self._changed:
            self._done, self._failed = not failed, failed
            self._changed.notify_all()
