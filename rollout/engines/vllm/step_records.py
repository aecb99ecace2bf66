"""Records, at each step of vLLM's scheduler, the tokens that are sampled, and the requests that run.

It runs in the model's process, where every step brings the scheduler's changes. vLLM's own log-probabilities,
objects of each token that pass through two more processes, and its statistics would cost time at every token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

FINISHED_KEPT = 4096
"""Finished requests whose tokens can still be fetched."""
NULL_BLOCKS = 1
"""Blocks that vLLM sets aside as placeholders."""


class SampledTokens:
    """Tokens of every request as the sampler drew them, with log-probabilities and versions.

    The thread that runs the model begins steps. Results may come from a thread that waits for the device, one
    step later, and are fetched in a third thread.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        """Version whose weights are live: tokens of the steps that begin now are sampled under it."""
        self._running: dict[str, _RequestTokens] = {}
        self._finished: OrderedDict[str, _RequestTokens] = OrderedDict()

    def begin_step(self, new: Iterable[str], finished: Iterable[str] = ()) -> None:
        """Record the beginning of a step.

        Args:
            new: ids of requests that may be in their first step.
            finished: ids of requests that ended before this step.
        """
        for request_id in finished:
            ended = self._running.pop(request_id, None)
            if ended is not None:
                self._finished[request_id] = ended
        while len(self._finished) > FINISHED_KEPT:
            self._finished.popitem(last=False)
        for request_id in new:
            self._running.setdefault(request_id, _RequestTokens())

    def add(
        self,
        request_ids: Iterable[str],
        tokens: Iterable[Sequence[int]],
        logprobs: Iterable[float],
        version: int,
    ) -> None:
        """Record what a step has sampled; a request that has ended meanwhile is left out.

        Args:
            request_ids: [B], the step's requests.
            tokens: [B], a token for each request, none for one whose prompt is not complete.
            logprobs: [B].
            version: `version` at the beginning of the step.
        """
        running = self._running
        for request_id, row, logprob in zip(request_ids, tokens, logprobs, strict=True):
            if row and (record := running.get(request_id)) is not None:
                record.append(row[0], logprob, version)

    def pop(self, request_id: str) -> tuple[bytes, bytes, list[tuple[int, int]]] | None:
        """Return and forget what was recorded of a request.

        Returns: token ids as int32, log-probabilities as float32, and marks (first token, version); None if
            the request was never scheduled, was fetched before, or ended too long ago.
        """
        record = self._running.pop(request_id, None) or self._finished.pop(request_id, None)
        return None if record is None else (record.tokens.tobytes(), record.logprobs.tobytes(), record.marks)


class _RequestTokens:
    """What was sampled for one request."""

    __slots__ = ("logprobs", "marks", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.logprobs = array("f")
        self.marks: list[tuple[int, int]] = []
        """(first token, version)."""

    def append(self, token: int, logprob: float, version: int) -> None:
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logprobs.append(logprob)


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
