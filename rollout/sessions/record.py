"""Records a sample's model calls and tool results before the harness sees them, and replays them.

States of a call within an attempt, and the methods that change the state:

    recorded ------------- take --------> placed
    generated --- answer, stored -------> placed -- put_back --> unseen -- unseen --> placed
    generated --- answer, cancelled ----------------------------> unseen
    recorded, unseen --- the attempt ends ---------------------> abandoned

- recorded: on disk, from an earlier lease or a killed program; waits for the harness to repeat the request.
- unseen: answered in this attempt, but the harness disconnected before reading the answer.
- placed: answered; the session added the call to the sample's tree.
- abandoned: in no row of the sample at the end of the attempt (`abandoned`); applies to tool results, too.

Calls are looked up by the hash of the request and the hash of its context. A replayed session therefore has
the same tree as the recorded one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from protocol.errors import EngineError, EpisodeError
from protocol.messages import Call, Recalled
from protocol.tensors import Array
from rollout.engines.base import Completion

log = logging.getLogger("tether.sessions")

Key = tuple[str, str]
"""(hash of a request, hash of its context)."""
_NO_IDS = Array.of([], "int32")


class CallJournal(Protocol):
    """Journal for the calls of a leased group.

    `CallSender` in `services/rollout/call_sender.py` implements the protocol.
    """

    async def recall(self, sample: int) -> Recalled:
        """Return the recorded calls of a sample. From then on, earlier leases of the group cannot record."""

    async def store(self, call: Call) -> None:
        """Return when a call is on disk.

        Raises:
            EpisodeError: the call cannot be stored, for example because its lease is lost.
        """


@dataclass(frozen=True, slots=True)
class Recording:
    """Lease under which the calls of a group are recorded."""

    journal: CallJournal
    group: int
    token: str
    epoch: str
    engine: str
    version: int
    """Weight version of the lease. Replayed calls that contain older tokens are not trained."""

    def sample(self, index: int) -> "SampleRecord":
        """Return the record of a sample."""
        return SampleRecord(self, index)


@dataclass(slots=True)
class SampleRecord:
    """Recorded calls of one sample over all its attempts; used by one attempt at a time."""

    recording: Recording
    index: int
    """Index of the sample in the group."""
    replayed: int = 0
    """Number of the attempt's calls that were answered from the record."""
    results: dict[str, bytes] = field(default_factory=dict)
    """Name -> JSON of tool results recorded before the attempt."""
    _resumes: bool = True
    """Whether the next attempt replays the record."""
    _attempt: int = -1
    _first: int = 0
    """Number of the attempt's first call."""
    _next: int = 0
    _recorded: dict[Key, list[Call]] = field(default_factory=dict)
    """Key -> recorded calls that were not requested again, by call number."""
    _unseen: dict[int, tuple[Key, Completion, Call | None]] = field(default_factory=dict)
    """Call number -> answer that the harness has not seen. The third item is a call whose write was cancelled
    and must be repeated."""

    async def begin(self, *, replayable: bool) -> None:
        """Start an attempt. The first attempt, and an attempt after `resume`, replays the record.

        Raises:
            EpisodeError: calls are recorded, and the harness must not run again.
        """
        self.replayed, self._recorded, self.results = 0, {}, {}
        self._unseen.clear()
        if not self._resumes:
            self._attempt, self._first = self._attempt + 1, self._next
            return
        record = await self.recording.journal.recall(self.index)
        calls = record.calls if record.attempt >= self._attempt else ()  # else of a failed attempt
        if calls and not replayable:
            raise EpisodeError(
                "replay",
                f"{len(calls)} calls are already recorded, and environment.options.replayable is off",
            )
        self._resumes = False
        self._next = max(self._next, record.number)  # a call of this lease may not be on disk yet
        if record.attempt > self._attempt:
            self._attempt, self._first = record.attempt, calls[0].number if calls else record.number
        for call in calls:
            if call.name:
                self.results[call.name] = call.result  # the harness saw the last one of a name
            else:
                self._recorded.setdefault((call.request, call.context), []).append(call)

    def resume(self) -> None:
        """Let the next attempt continue this one, after a signal ended the harness."""
        self._resumes = True

    @property
    def remaining(self) -> int:
        """Number of recorded calls that were not requested again."""
        return sum(map(len, self._recorded.values()))

    def take(self, key: Key) -> tuple[int, Completion] | None:
        """Return number and answer of a recorded call, once per call; equal keys in order of number."""
        if not (calls := self._recorded.get(key)):
            return None
        call = calls.pop(0)
        self.replayed += 1
        return call.number, completion_of(call)

    def put_back(self, number: int, key: Key, completion: Completion) -> None:
        """Keep an answer that the harness has not seen, for a repeated request."""
        self._unseen[number] = key, completion, None

    async def unseen(self, key: Key) -> tuple[int, Completion] | None:
        """Return number and answer of an unseen call of this attempt, after it is on disk."""
        number = next((number for number, (its_key, _, _) in self._unseen.items() if its_key == key), -1)
        if number < 0:
            return None
        _, completion, call = self._unseen.pop(number)
        if call is not None:
            await self._store(key, completion, call)
        return number, completion

    async def answer(
        self,
        key: Key,
        parent: int,
        inserted: Sequence[int],
        generate: Callable[[], Awaitable[Completion]],
        on_replayed: Callable[[Completion], None] | None,
        sampling: str = "",
    ) -> tuple[int, Completion]:
        """Return number and answer of a call: from the record, or generated and recorded.

        If cancelled, the call becomes unseen and may or may not be on disk.

        Args:
            key: lookup key of the call, see `key_of`.
            parent: number of the call whose tokens this call continues; -1: none.
            inserted: tokens between the parent's answer and this answer.
            on_replayed: callback for an answer from the record.
            sampling: as in `Call`.

        Raises:
            EngineError: the engine recorded experts, which a call cannot store.
            EpisodeError: the call cannot be recorded.
        """
        if (unseen := await self.unseen(key)) is not None:
            return unseen
        if (recorded := self.take(key)) is not None:
            if on_replayed is not None:
                on_replayed(recorded[1])
            return recorded
        began_ms = now_ms()
        completion = await generate()
        if completion.experts is not None:
            raise EngineError("recorded calls have no experts yet: set trainer.routing_replay to false")
        call = self._call(
            parent=parent,
            inserted=Array.of(inserted, "int32"),
            tokens=Array.of(completion.tokens, "int32"),
            logprobs=Array.of(completion.logprobs, "float32"),
            spans=Array.of(completion.spans, "int32"),
            finish_reason=completion.finish_reason,
            request=key[0],
            context=key[1],
            began_ms=began_ms,
            sampling=sampling,
        )
        await self._store(key, completion, call)
        return call.number, completion

    def result(self, name: str, value: bytes, began_ms: int) -> Call:
        """Return the journal message of a tool's result; its call number is used up, stored or not."""
        none = {"inserted": _NO_IDS, "tokens": _NO_IDS, "logprobs": Array.of([], "float32"), "spans": _NO_IDS}
        return self._call(
            name=name, result=value, began_ms=began_ms, parent=-1, finish_reason="", request="", context="",
            **none,
        )  # fmt: skip

    def _call(self, **fields: Any) -> Call:
        """Return a call with the next number."""
        number, self._next = self._next, self._next + 1
        lease = self.recording
        return Call(
            group=lease.group, token=lease.token, epoch=lease.epoch, engine=lease.engine,
            sample=self.index, attempt=self._attempt, number=number, ended_ms=now_ms(), **fields,
        )  # fmt: skip

    async def _store(self, key: Key, completion: Completion, call: Call) -> None:
        """Return when a call is on disk; if cancelled, the call becomes unseen."""
        try:
            await self.recording.journal.store(call)
        except asyncio.CancelledError:
            self._unseen[call.number] = key, completion, call
            raise

    def is_trained(self, completion: Completion) -> bool:
        """Return whether all tokens are from the lease's version or later, so that they may be trained."""
        return all(version >= self.recording.version for _, version in completion.spans)

    def warn_of_remaining(self) -> None:
        """Log a warning if the harness did not repeat all recorded calls."""
        if self.remaining:
            log.warning(
                "session.diverged group=%d sample=%d replayed=%d not_asked=%d",
                self.recording.group, self.index, self.replayed, self.remaining,
            )  # fmt: skip

    def abandoned(self, placed: Sequence[int]) -> list[int]:
        """Return the numbers of the attempt's calls and results that are not in `placed`."""
        return sorted(set(range(self._first, self._next)) - set(placed))


def key_of(request: str, context: Sequence[int]) -> Key:
    """Return the lookup key of a call.

    Args:
        request: text that identifies the request completely.
        context: tokens before the answer.
    """
    tokens = np.array(context, dtype=np.int32).tobytes()
    return xxhash.xxh3_128_hexdigest(request.encode()), xxhash.xxh3_128_hexdigest(tokens)


def completion_of(call: Call) -> Completion:
    """Return the completion of a recorded call."""
    return Completion(
        tokens=tuple(call.tokens.numpy().tolist()),
        logprobs=tuple(call.logprobs.numpy().tolist()),
        spans=tuple((int(end), int(version)) for end, version in call.spans.numpy()),
        finish_reason=call.finish_reason,
    )


def now_ms() -> int:
    """Return Unix time, ms."""
    return time.time_ns() // 1_000_000
