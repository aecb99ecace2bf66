"""Records, at each scheduler step, which weight version samples each token; runs in the model's process."""

from collections import OrderedDict
from collections.abc import Iterable

FINISHED_KEPT = 4096
"""Finished requests whose marks can still be read."""


class TokenVersions:
    """Marks (first token, version) of every request.

    A request gets a new mark at its first step after each change of weights.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._change = 0
        self._running: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        """Request id -> (change at its latest mark, its marks)."""
        self._finished: OrderedDict[str, list[tuple[int, int]]] = OrderedDict()

    def switch(self, version: int) -> None:
        """Count tokens from the next step on as sampled under `version`."""
        self._version = version
        self._change += 1

    def step(self, scheduled: Iterable[tuple[str, int]], finished: Iterable[str] = ()) -> None:
        """Record the beginning of a step.

        Args:
            scheduled: (request id, tokens that it has generated so far).
            finished: ids of requests that ended before this step.
        """
        for request_id in finished:
            ended = self._running.pop(request_id, None)
            if ended is not None:
                self._finished[request_id] = ended[1]
        while len(self._finished) > FINISHED_KEPT:
            self._finished.popitem(last=False)
        for request_id, tokens in scheduled:
            change, marks = self._running.get(request_id, (-1, []))
            if change != self._change:
                marks.append((tokens, self._version))
                self._running[request_id] = (self._change, marks)

    def of(self, request_id: str) -> list[tuple[int, int]]:
        """Return the marks of a request; none if it was never scheduled or ended too long ago."""
        running = self._running.get(request_id)
        return list(running[1] if running else self._finished.get(request_id, ()))
