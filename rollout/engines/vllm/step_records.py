"""Records the log-probabilities and versions of the tokens that vLLM's scheduler accepts.

It runs in the thread of the scheduler. A worker marks the result of each step with what `StepResult` holds;
vLLM's own log-probabilities would be objects of each token that pass through two processes. Whoever asked for
a request waits for its end, so the tokens between its first and its last are kept here until then: each
message costs the engine process and ours time at every step.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT_BYTES = 128 << 20
"""Memory of ended requests whose tokens can be fetched: one may be aborted as its last message leaves."""
ENTRY_BYTES = 512
"""Memory of such a request without its tokens."""
RECORD = "tether_record"
"""Key, in what vLLM passes on with a request's last tokens, of its log-probabilities and marks."""
_RESULT = "tether_result"

Marks = list[tuple[int, int]]
"""(First token, version), of which the last one for a token counts."""
Packed = tuple[bytes, bytes, Marks]
"""Record of a request: token ids as int32, log-probabilities as float32, and marks."""


class StepResult(NamedTuple):
    """Log-probabilities of a step, and their version, which a worker adds to its result."""

    version: int
    """Version that was live when the step was launched."""
    logprobs: NDArray[np.float32]
    """[N] of all requests, one after the other."""
    starts: Sequence[int] | None
    """[B], where each request's log-probabilities begin. None: [B] of them, one a request."""

    @staticmethod
    def take(output: Any, version: int) -> Any:
        """Replace the log-probabilities of vLLM's ModelRunnerOutput by ours, and return it."""
        if (found := getattr(output, "logprobs", None)) is not None:
            starts = getattr(found, "cu_num_generated_tokens", None)
            setattr(output, _RESULT, StepResult(version, found.logprobs[:, 0], starts))
            output.logprobs = None
        return output

    @staticmethod
    def of(output: Any) -> "StepResult | None":
        """Return the result that `take` left in a ModelRunnerOutput; None: no token was sampled."""
        return getattr(output, _RESULT, None)


class SampledTokens:
    """Tokens of every request, with log-probabilities and versions, and the answers that have to leave now.

    Results come in the order of their steps. A request is known by a number of ours, at the front of its id:
    vLLM appends random characters.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = 0
        """Memory of `_finished`."""
        self._version = -1
        """Version of the last result."""
        self._running: dict[str, _RequestTokens] = {}
        """By id."""
        self._ids: dict[str, str] = {}
        """Number -> id, of running requests."""
        self._finished: OrderedDict[str, Packed] = OrderedDict()
        """By number."""

    def begin(self, request: Any, *, waits: bool) -> None:
        """Record a request from now on.

        Args:
            request: vLLM's Request.
            waits: whether its tokens are wanted at its end alone.
        """
        self._running[request.request_id] = _RequestTokens(request, self._version, waits)
        self._ids[_number(request.request_id)] = request.request_id

    def end(self, request_ids: Iterable[str]) -> None:
        """Keep the records of requests that have ended, and earlier ones while there is room."""
        while self._bytes > self._kept_bytes:
            self._bytes -= _size(self._finished.popitem(last=False)[1])
        for request_id in request_ids:
            ended = self._running.pop(request_id, None)
            if ended is not None:
                number = _number(request_id)
                self._ids.pop(number, None)
                self._finished[number] = packed = ended.packed()
                self._bytes += _size(packed)

    def add(self, result: StepResult | None, rows: Mapping[str, int], answers: Sequence[Any]) -> list[Any]:
        """Record the tokens that the scheduler accepted of a step, and return the answers that cannot wait.

        These have all tokens that were kept back until now. The last one of a request has its record.

        Args:
            result: of the step; None: no token was sampled.
            rows: id -> row of the request in the result.
            answers: vLLM's EngineCoreOutputs of the requests.
        """
        values, starts = [], None
        if result is not None:
            values, starts = result.logprobs.tolist(), result.starts
            self._mark(result.version)
        running, leaving = self._running, []
        for answer in answers:  # every token passes here, in the process that limits small models
            name = answer.request_id
            record = running.get(name)
            if record is None:
                leaving.append(answer)
                continue
            if answer.new_token_ids and values:
                start = rows[name]
                if starts is None:
                    record.append(values[start])
                else:
                    start = starts[start]
                    record.logprobs.extend(values[start : start + len(answer.new_token_ids)])
            if (
                answer.finish_reason is None
                and record.waits
                and answer.prefill_stats is None
                and answer.routed_experts is None
            ):
                continue
            answer.new_token_ids = record.unsent()
            if answer.finish_reason is not None:
                answer.kv_transfer_params = {RECORD: record.packed()[1:]}
            leaving.append(answer)
        return leaving

    def _mark(self, version: int) -> None:
        """Note that the tokens that come next are of `version`."""
        if version != self._version:
            self._version = version
            for record in self._running.values():
                record.marks.append((len(record.logprobs), version))

    def pop(self, name: str) -> Packed | None:
        """Return and forget the record of a request; one that runs is not recorded any more.

        Args:
            name: the request's id, with or without the characters that vLLM appends.

        Returns: None if there was no such request, it was fetched before, or ended too long ago.
        """
        number = _number(name)
        if number in self._ids:
            self.end([self._ids[number]])
        found = self._finished.pop(number, None)
        self._bytes -= _size(found) if found is not None else 0
        return found


class _RequestTokens:
    """Tokens of one request."""

    __slots__ = ("_request", "_sent", "append", "logprobs", "marks", "waits")

    def __init__(self, request: Any, version: int, waits: bool) -> None:
        self._request, self.waits = request, waits
        self._sent = 0
        """Tokens that have left."""
        self.logprobs = array("f")
        self.append = self.logprobs.append
        self.marks: Marks = [(0, version)]

    def unsent(self) -> list[int]:
        """Return the tokens that have not left, which leave now."""
        tokens: list[int] = self._request.output_token_ids[self._sent :]
        self._sent += len(tokens)
        return tokens

    def packed(self) -> Packed:
        tokens = array("i", self._request.output_token_ids[:])
        return tokens.tobytes(), self.logprobs.tobytes(), self.marks


def _size(packed: Packed) -> int:
    return len(packed[0]) + len(packed[1]) + ENTRY_BYTES


def _number(request_id: str) -> str:
    """Return our own number from the front of an id."""
    return request_id.partition(":")[0]
