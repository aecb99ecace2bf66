"""Records the calls of one sample and its tools' results, each before it is seen, and gives them again.

These are of an earlier lease, or of a program that was killed. A call is found by the hash of its request and
that of its context, so a replayed session has the same tree as the one that was recorded.
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
"""Hash of a request and of its context."""
_NO_IDS = Array.of([], "int32")


class CallJournal(Protocol):
    """Where the calls of a leased group are kept."""

    async def recall(self, sample: int) -> Recalled:
        """Return what is recorded of a sample; holders of earlier leases cannot record any more."""

    async def store(self, call: Call) -> None:
        """Return when a call is on disk.

        Raises:
            EpisodeError: it never will be, such as one of a lost lease.
        """


@dataclass(frozen=True, slots=True)
class Recording:
    """The lease under which the calls of a group are recorded."""

    journal: CallJournal
    group: int
    token: str
    epoch: str
    engine: str
    version: int
    """That of the lease: of a recorded call with an older token nothing is trained."""

    def sample(self, index: int) -> "SampleRecord":
        """Return the record of a sample."""
        return SampleRecord(self, index)


@dataclass(slots=True)
class SampleRecord:
    """The recorded calls of one sample, over all its attempts; one attempt at a time uses it."""

    recording: Recording
    index: int
    """Index of the sample in the group."""
    replayed: int = 0
    """Calls of the attempt that were answered from the record."""
    results: dict[str, bytes] = field(default_factory=dict)
    """Name -> JSON: what tools had answered when the attempt began."""
    _resumes: bool = True
    """Whether the next attempt goes by the record."""
    _attempt: int = -1
    _first: int = 0
    """Number of the attempt's first call."""
    _next: int = 0
    _left: dict[Key, list[Call]] = field(default_factory=dict)
    """Recorded calls that were not asked for again, by number."""
    _unseen: dict[int, tuple[Key, Completion, Call | None]] = field(default_factory=dict)
    """Answers that nobody has seen, by number; those that may not be on disk with their message."""

    async def begin(self, *, replayable: bool) -> None:
        """Begin an attempt: the first one, and one after `resume`, goes by the record; others begin anew.

        Raises:
            EpisodeError: there is a record, and the harness must not be run again.
        """
        self.replayed, self._left, self.results = 0, {}, {}
        self._unseen.clear()
        if not self._resumes:
            self._attempt, self._first = self._attempt + 1, self._next
            return
        found = await self.recording.journal.recall(self.index)
        calls = found.calls if found.attempt >= self._attempt else ()  # else of one that failed
        if calls and not replayable:
            raise EpisodeError(
                "replay",
                f"{len(calls)} calls were made before, and environment.options.replayable is off",
            )
        self._resumes = False
        self._next = max(self._next, found.number)  # a call of this lease may still be on its way to the disk
        if found.attempt > self._attempt:
            self._attempt, self._first = found.attempt, calls[0].number if calls else found.number
        for call in calls:
            if call.name:
                self.results[call.name] = call.result  # nobody has seen an earlier one of the same name
            else:
                self._left.setdefault((call.request, call.context), []).append(call)

    def resume(self) -> None:
        """Let the next attempt continue this one: a signal ended its harness."""
        self._resumes = True

    @property
    def left(self) -> int:
        """Recorded calls that were not asked for again."""
        return sum(map(len, self._left.values()))

    def take(self, key: Key) -> tuple[int, Completion] | None:
        """Return number and answer of a recorded call; each is taken once, equal ones by number."""
        if not (found := self._left.get(key)):
            return None
        call = found.pop(0)
        self.replayed += 1
        return call.number, completion_of(call)

    def put_back(self, number: int, key: Key, completion: Completion) -> None:
        """Keep an answer that the harness has not seen, for when it asks again."""
        self._unseen[number] = key, completion, None

    async def unseen(self, key: Key) -> tuple[int, Completion] | None:
        """Return number and answer of a call of this attempt that nobody has seen, once it is on disk."""
        number = next((number for number, (known, _, _) in self._unseen.items() if known == key), -1)
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
    ) -> tuple[int, Completion]:
        """Return number and answer of a call: from the record, or generated and recorded.

        Cancelled, the call may be on disk or not: nobody has seen its answer.

        Args:
            key: what the call is found by.
            parent: number of the call whose tokens it continues; -1: it begins anew.
            inserted: the tokens between that one's answer and this one.
            generate: makes the answer.
            on_replayed: called with one of the record.

        Raises:
            EngineError: the engine recorded experts, too, which a call has no place for.
            EpisodeError: the call cannot be recorded.
        """
        if (unseen := await self.unseen(key)) is not None:
            return unseen
        if (known := self.take(key)) is not None:
            if on_replayed is not None:
                on_replayed(known[1])
            return known
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
        )
        await self._store(key, completion, call)
        return call.number, completion

    def result(self, name: str, value: bytes, began_ms: int) -> Call:
        """Return the message of a tool's result, for the journal; its number is taken, stored or not."""
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
        """Return when a call is on disk; cancelled, it is kept as one that nobody has seen."""
        try:
            await self.recording.journal.store(call)
        except asyncio.CancelledError:
            self._unseen[call.number] = key, completion, call
            raise

    def is_trained(self, completion: Completion) -> bool:
        """Return whether an answer is of the lease's version or later ones, so that it may be trained."""
        return all(version >= self.recording.version for _, version in completion.spans)

    def warn_of_left(self) -> None:
        """Log that a harness did not ask for all of its recorded calls again, if it is so."""
        if self.left:
            log.warning(
                "session.diverged group=%d sample=%d replayed=%d not_asked=%d",
                self.recording.group, self.index, self.replayed, self.left,
            )  # fmt: skip

    def without_place(self, placed: Sequence[int]) -> list[int]:
        """Return the numbers of the attempt's other calls than those in the sample; results are such."""
        return sorted(set(range(self._first, self._next)) - set(placed))


def key_of(request: str, context: Sequence[int]) -> Key:
    """Return what a call is found by: a text that holds all of its request, and the tokens it continues."""
    tokens = np.array(context, dtype=np.int32).tobytes()
    return xxhash.xxh3_128_hexdigest(request.encode()), xxhash.xxh3_128_hexdigest(tokens)


def completion_of(call: Call) -> Completion:
    """Return the answer of a recorded call, as the engine gave it."""
    return Completion(
        tokens=tuple(call.tokens.numpy().tolist()),
        logprobs=tuple(call.logprobs.numpy().tolist()),
        spans=tuple((int(end), int(version)) for end, version in call.spans.numpy()),
        finish_reason=call.finish_reason,
    )


def now_ms() -> int:
    """Return Unix time, ms."""
    return time.time_ns() // 1_000_000
