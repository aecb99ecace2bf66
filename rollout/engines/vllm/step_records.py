"""Records log-probabilities and versions of the tokens that vLLM's scheduler accepts.

The code runs in the scheduler's thread. Workers attach a `StepResult` to the result of each step, because
vLLM's own log-probabilities are one object per token that passes through two processes. Tokens between a
request's first and last are held back until its end, because each message costs both processes time at every
step.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT_BYTES = 128 << 20
"""Memory limit for records of ended requests. They can still be fetched, because a request may be aborted
while its last message is sent."""
ENTRY_BYTES = 512
"""Memory of such a record without its tokens, bytes."""
RECORD = "tether_record"
"""Key of log-probabilities and marks in the data that vLLM passes along with a request's last tokens."""
_RESULT = "tether_result"

Marks = list[tuple[int, int]]
"""(first token, version); for equal indices the last mark counts."""
Packed = tuple[bytes, bytes, Marks]
"""Record of a request: token ids as int32, log-probabilities as float32, and marks."""


class StepResult(NamedTuple):
    """Log-probabilities of a step and their version, attached to its result by a worker."""

    version: int
    """Version that was live when the step was launched."""
    logprobs: NDArray[np.float32]
    """[N] log-probabilities of all requests, concatenated."""
    starts: Sequence[int] | None
    """[B] start of each request's log-probabilities; None: one per request."""

    @staticmethod
    def take(output: Any, version: int) -> Any:
        """Replace the log-probabilities in vLLM's ModelRunnerOutput with a `StepResult`; return it."""
        if (found := getattr(output, "logprobs", None)) is not None:
            starts = getattr(found, "cu_num_generated_tokens", None)
            setattr(output, _RESULT, StepResult(version, found.logprobs[:, 0], starts))
            output.logprobs = None
        return output

    @staticmethod
    def of(output: Any) -> "StepResult | None":
        """Return the result attached by `take`; None if no token was sampled."""
        return getattr(output, _RESULT, None)


class SampledTokens:
    """Tokens of every request with log-probabilities and versions; decides which answers are sent now.

    Results arrive in step order. Requests are identified by the number at the start of their id, because vLLM
    appends random characters.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = 0
        """Memory of `_finished`, bytes."""
        self._version = -1
        """Version of the last result."""
        self._running: dict[str, _RequestTokens] = {}
        """Request id -> tokens."""
        self._ids: dict[str, str] = {}
        """Number -> id of running requests."""
        self._finished: OrderedDict[str, Packed] = OrderedDict()
        """Number -> record of ended requests."""

    def begin(self, request: Any, *, waits: bool) -> None:
        """Start recording a request.

        Args:
            request: vLLM's Request.
            waits: whether the request's tokens are needed only at the request's end.
        """
        self._running[request.request_id] = _RequestTokens(request, self._version, waits)
        self._ids[_number(request.request_id)] = request.request_id

    def end(self, request_ids: Iterable[str]) -> None:
        """Store the records of ended requests; evict old records beyond the memory limit."""
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
        """Record the accepted tokens of a step; return the answers that must be sent now.

        A sent answer contains all tokens held back so far. The last answer of a request contains its record.

        Args:
            result: result of the step; None: no token was sampled.
            rows: request id -> row of the request in the result.
            answers: vLLM's EngineCoreOutputs of the requests.
        """
        values, starts = [], None
        if result is not None:
            values, starts = result.logprobs.tolist(), result.starts
            self._mark(result.version)
        running, leaving = self._running, []
        for answer in answers:  # hot path: every token passes here, in the process that limits small models
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
        """Set the version of the following tokens."""
        if version != self._version:
            self._version = version
            for record in self._running.values():
                record.marks.append((len(record.logprobs), version))

    def pop(self, name: str) -> Packed | None:
        """Return and remove the record of a request; recording of a running request stops.

        Args:
            name: request id, with or without vLLM's suffix.

        Returns: None if the request is unknown, was already fetched, or was evicted.
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
        """Number of sent tokens."""
        self.logprobs = array("f")
        self.append = self.logprobs.append
        self.marks: Marks = [(0, version)]

    def unsent(self) -> list[int]:
        """Return the tokens not sent yet, and mark them as sent."""
        tokens: list[int] = self._request.output_token_ids[self._sent :]
        self._sent += len(tokens)
        return tokens

    def packed(self) -> Packed:
        tokens = array("i", self._request.output_token_ids[:])
        return tokens.tobytes(), self.logprobs.tobytes(), self.marks


def _size(packed: Packed) -> int:
    return len(packed[0]) + len(packed[1]) + ENTRY_BYTES


def _number(request_id: str) -> str:
    """Return the number at the start of an id."""
    return request_id.partition(":")[0]
