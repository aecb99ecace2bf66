"""Which version sampled which token, written down where it happens: at the scheduler's step, in the process
of the model."""

from collections import OrderedDict
from collections.abc import Iterable

FINISHED_KEPT = 4096
"""Finished requests whose marks can still be asked for."""


class TokenVersions:
    """For every request the marks (first token, version), a new one at its first step after each change of
    weights."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._change = 0
        self._alive: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        self._finished: OrderedDict[str, list[tuple[int, int]]] = OrderedDict()

    def switch(self, version: int) -> None:
        """From the next step on tokens are sampled under `version`."""
        self._version = version
        self._change += 1

    def step(self, scheduled: Iterable[tuple[str, int]], finished: Iterable[str] = ()) -> None:
        """A step begins. `scheduled`: requests and how many tokens each has so far; `finished`: requests that
        ended before it."""
        for request_id in finished:
            ended = self._alive.pop(request_id, None)
            if ended is not None:
                self._finished[request_id] = ended[1]
        while len(self._finished) > FINISHED_KEPT:
            self._finished.popitem(last=False)
        for request_id, tokens in scheduled:
            change, marks = self._alive.get(request_id, (-1, []))
            if change != self._change:
                marks.append((tokens, self._version))
                self._alive[request_id] = (self._change, marks)

    def of(self, request_id: str) -> list[tuple[int, int]]:
        """Marks of a request; empty if it was never scheduled or ended too long ago."""
        alive = self._alive.get(request_id)
        return list(alive[1] if alive else self._finished.get(request_id, ()))
