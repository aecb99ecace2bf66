"""Records, at each step of vLLM's scheduler, the version that samples each token, and the requests that run.

It runs in the model's process, where every step brings what the scheduler has changed; vLLM's own statistics
would cost time at every token.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

FINISHED_KEPT = 4096
"""Finished requests whose marks can still be read."""
NULL_BLOCKS = 1
"""Blocks that vLLM sets aside as a place for nothing."""


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


class ScheduledRequests:
    """The requests of the scheduler's last step, and the KV blocks of all requests that have any."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}
        """Request id -> its blocks; preempted requests keep their entry until they run again or end."""
        self._scheduled: tuple[str, ...] = ()

    @property
    def running(self) -> int:
        """Requests in the last step."""
        return len(self._scheduled)

    def kv_use(self, blocks: int) -> float | None:
        """Return the share of the cache's `blocks` that the running requests hold; None if it has none.

        A block that several of them share counts once.
        """
        if blocks <= NULL_BLOCKS:
            return None
        held = set().union(*(self._blocks.get(name, ()) for name in self._scheduled))
        return min(1.0, len(held) / (blocks - NULL_BLOCKS))

    def step(self, output: Any) -> None:
        """Record the beginning of a step; `output` is vLLM's SchedulerOutput."""
        for name in output.finished_req_ids:
            self._blocks.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = set(_flat(new.block_ids))
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:  # its old blocks were freed when it was preempted
                self._blocks[name] = set()
            if added is not None:
                self._blocks.setdefault(name, set()).update(_flat(added))
        self._scheduled = tuple(output.num_scheduled_tokens)


def _flat(groups: Iterable[Iterable[int]]) -> Iterable[int]:
    """Yield the blocks of all groups of layers; they come from one pool."""
    return (block for group in groups for block in group)
