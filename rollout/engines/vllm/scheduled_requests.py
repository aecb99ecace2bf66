"""Records which requests vLLM's scheduler runs and which blocks of its KV cache they hold.

It runs in the model's process, where every step brings the scheduler's changes; vLLM's own statistics would
cost time at every token.
"""

from collections.abc import Iterable
from typing import Any

NULL_BLOCKS = 1
"""Blocks that vLLM sets aside as placeholders."""


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
