"""Records the tool results of one attempt at a sample; each result is on disk before it is returned.

A harness that runs again on a record gets the recorded result of a name; the tool does not run again.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from protocol.messages import Call
from rollout.off_loop import off_loop, size_of
from rollout.sessions.record import SampleRecord, now_ms
from rollout.sessions.refusal import RequestRefused, ended, invalid

MAX_NAME = 256
"""Maximum characters of a result's name."""
MAX_RESULTS = 10_000
"""Maximum results of one attempt."""
MAX_BYTES = 64 << 20
"""Maximum total size of an attempt's results as JSON, bytes. The record limits calls and results together to
the same values."""


class Results:
    """Named tool results of one attempt at a sample; kept only in memory if there is no record."""

    def __init__(self, record: SampleRecord | None = None) -> None:
        """Start with the results of a record whose attempt has begun."""
        self._record = record
        self._known = dict(record.results) if record is not None else {}
        self._size = sum(map(len, self._known.values()))
        self._unseen: dict[str, Call] = {}
        """Results that may not be on disk yet."""
        self._running: dict[str, asyncio.Lock] = {}
        self._storing: set[asyncio.Task[None]] = set()
        self._ended = ""

    async def once(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the recorded result of a name, or run `work` and return its result after it is on disk.

        Results pass through JSON even on the first call, so tuples become lists. Cancelling the call cancels
        `work`. If the result is already on disk, the next call with the name returns it.

        Raises:
            RequestRefused: the name or result is invalid, a limit is reached, or the session has ended.
            EpisodeError: the result cannot be recorded, for example because the lease is lost.
            Exception: any exception of `work`; no result is recorded.
        """
        async with self._running.setdefault(checked_name(name), asyncio.Lock()):
            result = await self.find(name)
            if result is None:
                began_ms = now_ms()
                result = await self._kept(name, await _off_loop_json(name, await work()), began_ms)
            result_before = result
            return await off_loop(len(result_before), lambda: json.loads(result_before))

    async def find(self, name: str) -> bytes | None:
        """Return the JSON result of a name after it is on disk; None if there is no result.

        Raises:
            RequestRefused, EpisodeError: see `once`.
        """
        if (call := self._unseen.get(checked_name(name))) is not None:
            await self._store(name, call)
        return self._known.get(name)

    async def keep(self, name: str, value: Any) -> bytes:
        """Record a result and return it as JSON after it is on disk.

        Recording an equal result again is allowed.

        Raises:
            RequestRefused: see `once`; or the name already has a different result.
            EpisodeError: see `once`.
        """
        encoded = await _off_loop_json(checked_name(name), value)
        result = await self.find(name)
        if result is None:
            return await self._kept(name, encoded, now_ms())
        if result != encoded:
            raise RequestRefused(409, "already_recorded", f"another result is recorded as {name!r}")
        return result

    def end(self, reason: str) -> None:
        """Refuse further results, and cancel writes in progress."""
        self._ended = self._ended or reason
        for task in self._storing:
            task.cancel()

    async def _kept(self, name: str, value: bytes, began_ms: int) -> bytes:
        if self._ended:
            raise ended(self._ended)
        if len(self._known) + len(self._unseen) >= MAX_RESULTS or self._size + len(value) > MAX_BYTES:
            raise RequestRefused(
                403, "too_many_results",
                f"the result {name!r} of {len(value)} bytes exceeds the limit of an episode: at most "
                f"{MAX_RESULTS} results and {MAX_BYTES >> 20} MiB",
            )  # fmt: skip
        self._size += len(value)
        if self._record is None:
            self._known[name] = value
        else:
            self._unseen[name] = call = self._record.result(name, value, began_ms)
            await self._store(name, call)
        return value

    async def _store(self, name: str, call: Call) -> None:
        """Return when a result is on disk. After cancellation or refusal, the next lookup stores it again."""
        assert self._record is not None
        if self._ended:
            raise ended(self._ended)
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(self._record.recording.journal.store(call), name="session.result")
                self._storing.add(task)
                task.add_done_callback(self._storing.discard)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if task.cancelled():
            raise ended(self._ended)
        self._unseen.pop(name, None)
        self._known[name] = call.result


def checked_name(name: str) -> str:
    """Return the name of a result.

    Raises:
        RequestRefused: the name is empty, too long or not printable.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise invalid(
            f"the name of a result has 1 to {MAX_NAME} printable characters, not {name[:80]!r}", "name"
        )
    return name


async def _off_loop_json(name: str, value: Any) -> bytes:
    """Return a result as JSON; large results are encoded in a thread."""
    return await off_loop(size_of(value), lambda: as_json(name, value))


def as_json(name: str, value: Any) -> bytes:
    """Return a result as JSON.

    Raises:
        RequestRefused: the result is not a JSON value.
    """
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(f"the result {name!r} is not a JSON value: {str(error)[:200]}") from None
