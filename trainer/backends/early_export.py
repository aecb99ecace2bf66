"""Hands over the tensors of a version while the optimizer's step still makes others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protocol.errors import WeightError

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch

Tensors = Iterator["tuple[str, torch.Tensor]"]
"""(Hugging Face name, tensor) in the order of export."""


class EarlyExport:
    """The parameters of a step that have their last values. One thread makes the step, another one exports.

    A step of which an update is skipped, or that fails before the last one, has begun no export. One that
    fails later ends the export with an error, so nothing of it is published.
    """

    def __init__(
        self,
        begin: Callable[[Tensors], None] | None = None,
        export: Callable[[EarlyExport], Tensors] | None = None,
        updates: int = 1,
    ) -> None:
        """Prepare for one step.

        Args:
            begin: called in the thread of the step, once its last update will be made, with what yields each
                tensor of the new version when it is final; to be consumed in another thread. None: nothing is
                exported early.
            export: returns these tensors; waits for each by `await_final`.
            updates: of the step, each of which may be skipped.
        """
        self._begin, self._export, self._left = begin, export, updates
        self._changed = threading.Condition()
        self._final: dict[int, torch.cuda.Event | None] = {}
        """Parameters that are final, by identity; on a GPU after the event."""
        self._begun = self._done = self._failed = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make the step within the block: after it all is final, or nothing ever will be if it raises."""
        try:
            yield
        except BaseException:
            self._end(failed=True)
            raise
        self._end(failed=False)

    def begin(self) -> None:
        """Say that an update will be made: nothing can skip it any more.

        Raises:
            RuntimeError: an export was begun before, of parameters that this update would change.
        """
        if self._begin is None or self._export is None:
            return
        if self._begun:
            raise RuntimeError("another update would change parameters that are being published")
        self._left -= 1
        if not self._left:
            self._begun = True
            self._begin(self._export(self))

    def add(self, parameters: Iterable[torch.Tensor], event: torch.cuda.Event | None) -> None:
        """Say that an update has made parameters; those on a GPU are there after the event."""
        if self._begun:
            with self._changed:
                self._final |= {id(parameter): event for parameter in parameters}
                self._changed.notify_all()

    def await_final(self, parameter: torch.Tensor) -> None:
        """Wait until a parameter is final, for work on the current stream.

        What the optimizer does not step is final when the step is over. The wait ends with the step.

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
