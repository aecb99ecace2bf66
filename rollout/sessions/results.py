"""Keeps the tool results of one attempt at a sample, each on disk before it is returned.

A harness that is run again on the record gets a result that it has seen under the same name, instead of
running the tool again.
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
"""Characters of a name."""
MAX_RESULTS = 10_000
"""Results of one attempt."""
MAX_BYTES = 64 << 20
"""Bytes of all of them together, as JSON. With calls the record of a sample has the same limits."""


class Results:
    """Name -> result of one attempt at a sample; without a record they are kept in memory alone."""

    def __init__(self, record: SampleRecord | None = None) -> None:
        """Begin with the results of the record, whose attempt was begun."""
        self._record = record
        self._known = dict(record.results) if record is not None else {}
        self._size = sum(map(len, self._known.values()))
        self._unseen: dict[str, Call] = {}
        """Results that may or may not be on disk."""
        self._running: dict[str, asyncio.Lock] = {}
        self._storing: set[asyncio.Task[None]] = set()
        self._ended = ""

    async def once(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of this name; if there is none, the result of `work`, once it is on disk.

        The result has passed through JSON, from the record or not: a tuple is a list. Cancellation cancels
        `work`, too; if its result is on disk already, the next request for the name gets it.

        Raises:
            RequestRefused: the name or the result does not fit, there are too many, or the session has ended.
            EpisodeError: it cannot be recorded, such as under a lost lease.
            Exception: any exception of `work`; no result is recorded then.
        """
        async with self._running.setdefault(checked_name(name), asyncio.Lock()):
            result = await self.find(name)
            if result is None:
                began_ms = now_ms()
                result = await self._kept(name, await _off_loop_json(name, await work()), began_ms)
            result_before = result
            return await off_loop(len(result_before), lambda: json.loads(result_before))

    async def find(self, name: str) -> bytes | None:
        """Return the result of a name as JSON, once it is on disk; None: there is none.

        Raises:
            RequestRefused, EpisodeError: as for `once`.
        """
        if (call := self._unseen.get(checked_name(name))) is not None:
            await self._store(name, call)
        return self._known.get(name)

    async def keep(self, name: str, value: Any) -> bytes:
        """Record a result and return it as JSON, once it is on disk; the same may be recorded again.

        Raises:
            RequestRefused: as for `once`, or another result has this name.
            EpisodeError: as for `once`.
        """
        encoded = await _off_loop_json(checked_name(name), value)
        result = await self.find(name)
        if result is None:
            return await self._kept(name, encoded, now_ms())
        if result != encoded:
            raise RequestRefused(409, "already_recorded", f"another result is recorded as {name!r}")
        return result

    def end(self, reason: str) -> None:
        """Refuse further results; writes in progress are not awaited."""
        self._ended = self._ended or reason
        for task in self._storing:
            task.cancel()

    async def _kept(self, name: str, value: bytes, began_ms: int) -> bytes:
        if self._ended:
            raise ended(self._ended)
        if len(self._known) + len(self._unseen) >= MAX_RESULTS or self._size + len(value) > MAX_BYTES:
            raise RequestRefused(
                403, "too_many_results",
                f"the result {name!r} of {len(value)} bytes is one too many: an episode records at most "
                f"{MAX_RESULTS} and {MAX_BYTES >> 20} MiB",
            )  # fmt: skip
        self._size += len(value)
        if self._record is None:
            self._known[name] = value
        else:
            self._unseen[name] = call = self._record.result(name, value, began_ms)
            await self._store(name, call)
        return value

    async def _store(self, name: str, call: Call) -> None:
        """Return when a result is on disk. Cancelled or refused, it is stored again when it is asked for."""
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
        RequestRefused: it is empty, too long, or has what cannot be printed.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise invalid(
            f"the name of a result has 1 to {MAX_NAME} printable characters, not {name[:80]!r}", "name"
        )
    return name


async def _off_loop_json(name: str, value: Any) -> bytes:
    """Return a result as JSON; a large one is encoded in a thread."""
    return await off_loop(size_of(value), lambda: as_json(name, value))


def as_json(name: str, value: Any) -> bytes:
    """Return a result as JSON.

    Raises:
        RequestRefused: it is no JSON value.
    """
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(f"the result {name!r} is no JSON value: {str(error)[:200]}") from None
