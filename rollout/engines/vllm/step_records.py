"""Records, at each step of vLLM's scheduler, the tokens that are sampled, and the requests that run.

It runs in the model's process, where every step brings the scheduler's changes. vLLM's own log-probabilities,
objects of each token that pass through two more processes, and its statistics would cost time at every token.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

FINISHED_KEPT = 4096
"""Finished requests whose tokens can still be fetched."""
NULL_BLOCKS = 1
"""Blocks that vLLM sets aside as placeholders."""

Packed = tuple[bytes, bytes, list[tuple[int, int]]]
"""What was sampled for a request: token ids as int32, log-probabilities as float32, and marks (first token,
version), of which the last one for a token counts."""


class SampledTokens:
    """Tokens of every request as the sampler drew them, with log-probabilities and versions.

    The thread that runs the model begins steps. Results may come from a thread that waits for the device, one
    step later but in order, and are fetched in a third thread. A request is known by a number of ours, at the
    front of its id: vLLM appends random characters.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        """Version whose weights are live: tokens of the steps that begin now are sampled under it."""
        self._marked = version
        """Version of the last result."""
        self._running: dict[str, _RequestTokens] = {}
        """By id."""
        self._ids: dict[str, str] = {}
        """Number -> id, of running requests."""
        self._finished: OrderedDict[str, Packed] = OrderedDict()
        """By number."""
        self._lock = threading.Lock()
        """Held while a request changes its place."""

    def begin_step(self, new: Iterable[str], finished: Iterable[str] = ()) -> None:
        """Record the beginning of a step.

        Args:
            new: ids of requests that may be in their first step.
            finished: ids of requests that ended before this step.
        """
        with self._lock:
            for request_id in finished:
                ended = self._running.pop(request_id, None)
                if ended is not None:
                    number = _number(request_id)
                    self._finished[number] = ended.packed()  # a cancelled request is never fetched
                    self._ids.pop(number, None)
            while len(self._finished) > FINISHED_KEPT:
                self._finished.popitem(last=False)
            for request_id in new:
                if request_id not in self._running:
                    self._running[request_id] = _RequestTokens(self.version)
                    self._ids[_number(request_id)] = request_id

    def add(
        self,
        request_ids: Iterable[str],
        tokens: Iterable[Sequence[int]],
        logprobs: Sequence[float],
        version: int,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Record the result of a step; a request that has ended meanwhile is left out.

        Args:
            request_ids: [B], the step's requests.
            tokens: [B], the tokens of each request: one, more where drafts were accepted, none where the
                prompt is not complete.
            logprobs: [N] of all requests, one after the other.
            version: `version` at the beginning of the step.
            starts: [B], where each request's log-probabilities begin. None: [B] of them, one a request.
        """
        if version != self._marked:
            self._marked = version
            for record in list(self._running.values()):
                record.marks.append((len(record.tokens), version))
        records = map(self._running.get, request_ids)
        if starts is None:
            # 40 us for 512 requests, in the process that limits small models; a batch may be padded
            for found, row, logprob in zip(records, tokens, logprobs, strict=False):
                if row and found is not None:
                    found.tokens.append(row[0])
                    found.logprobs.append(logprob)
            return
        for found, row, start in zip(records, tokens, starts, strict=False):
            if found is not None:
                found.tokens += row
                found.logprobs += logprobs[start : start + len(row)]

    def pop(self, name: str) -> Packed | None:
        """Return and forget what was recorded of a request.

        Args:
            name: the request's id, with or without the characters that vLLM appends.

        Returns: None if the request was never scheduled, was fetched before, or ended too long ago.
        """
        number = _number(name)
        with self._lock:
            request_id = self._ids.pop(number, None)
            if request_id is None:
                return self._finished.pop(number, None)
            return self._running.pop(request_id).packed()


class _RequestTokens:
    """Tokens of one request."""

    __slots__ = ("logprobs", "marks", "tokens")

    def __init__(self, version: int) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.marks = [(0, version)]
        """(first token, version)."""

    def packed(self) -> Packed:
        return array("i", self.tokens).tobytes(), array("f", self.logprobs).tobytes(), self.marks


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


def _number(request_id: str) -> str:
    """Return our own number from the front of an id."""
    return request_id.partition(":")[0]


def _flat(groups: Iterable[Iterable[int]]) -> Iterable[int]:
    """Yield the blocks of all groups of layers; they come from one pool."""
    return (block for group in groups for block in group)
