"""Runs verifiers that wait, many calls at once: `python -m reward.workers.async_worker`.

Started by `async_client.py`. Frames in both directions as those of `worker.py`.

    in   [memory_mb, timeout_s, modules, [[verifier, options] or nil, ...]]    once
    out  ["ready"] or ["settings", text]                                      once
    in   ["open", group, frame]       a group, as a frame of `worker.py`
    in   ["close", group]             it is needed no more
    in   ["call", call, verifier, group, [sample, ...]]
    in   ["cancel", call]             no answer is wanted
    out  ["answer", call, [number, [number, ...] or nil, ...] or nil, error, counts, text, problem]
    out  ["alive"]                    every `ALIVE_S`: the event loop runs
    out  ["ending"]                   the process ends after its next answer, which is of the call to blame
"""

import asyncio
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from protocol.errors import SettingsError
from reward.group import ResponseGroup, Verdict
from reward.notes import Notes
from reward.verifiers.awaited import AwaitedVerifier
from reward.verifiers.registry import make_verifier
from reward.workers.worker import LENGTH, begin, decode_group, describe_error, write_frame

ALIVE_S = 0.5
GRACE_S = 1.0
"""Time for a call to end after it was cancelled; one that does not ends the process."""
MAX_TEXT = 2000
"""Characters of what a judge said that are sent."""
MAX_PROBLEM = 300
STUBBORN = 77
"""Exit code of a process with a call that does not end when it is cancelled."""


def main() -> None:
    """Serve until standard input ends or the parent dies."""
    _, sink, memory_mb, timeout_s, configured = begin()
    try:
        verifiers = [make_verifier(*item) if item else None for item in configured]
    except SettingsError as error:
        write_frame(sink, ["settings", str(error)])
        return
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    write_frame(sink, ["ready"])
    awaited = {i: item for i, item in enumerate(verifiers) if isinstance(item, AwaitedVerifier)}
    asyncio.run(_Server(awaited, timeout_s, sink).serve())


class _Server:
    """Answers calls; its process serves one client."""

    def __init__(self, verifiers: dict[int, AwaitedVerifier], timeout_s: float, sink: BinaryIO) -> None:
        self._verifiers, self._timeout_s, self._sink = verifiers, timeout_s, sink
        self._slots = {i: asyncio.Semaphore(item.max_running) for i, item in verifiers.items()}
        self._groups: dict[int, ResponseGroup | str] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._printed: set[str] = set()

    async def serve(self) -> None:
        """Serve until standard input ends; what runs then ends with the process."""
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), sys.stdin
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._alive_loop(), name="alive")
            while True:
                try:
                    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
                    frame = msgspec.msgpack.decode(await stream.readexactly(length))
                except asyncio.IncompleteReadError:
                    os._exit(0)
                self._take(tasks, *frame)

    def _take(self, tasks: asyncio.TaskGroup, kind: str, number: int, *rest: Any) -> None:
        """Do what a frame asks for."""
        if kind == "open":
            _, *parts = msgspec.msgpack.decode(rest[0])
            self._groups[number] = decode_group(*parts)
        elif kind == "close":
            self._groups.pop(number, None)
        elif kind == "cancel":
            if task := self._calls.get(number):
                task.cancel()
        else:
            verifier, group, samples = rest
            task = tasks.create_task(
                self._call(tasks, number, verifier, self._groups[group], samples), name=f"call-{number}"
            )
            self._calls[number] = task
            task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _alive_loop(self) -> None:
        while True:
            write_frame(self._sink, ["alive"])
            await asyncio.sleep(ALIVE_S)

    async def _call(
        self,
        tasks: asyncio.TaskGroup,
        call: int,
        number: int,
        group: ResponseGroup | str,
        samples: Sequence[int],
    ) -> None:
        """Answer one call, at the latest `timeout_s` and `GRACE_S` after it has a slot."""
        notes = Notes()
        async with self._slots[number]:
            running = tasks.create_task(
                self._run(self._verifiers[number], group, samples, notes), name=f"run-{call}"
            )
            with suppress(asyncio.CancelledError):  # nobody waits any more; the call has to end all the same
                await asyncio.wait({running}, timeout=self._timeout_s)
            is_late = not running.done()
            running.cancel()
            if not is_late:
                self._answer(call, *running.result(), notes)
                return
            await asyncio.wait({running}, timeout=GRACE_S)
            is_stubborn = not running.done()
            if is_stubborn:
                write_frame(self._sink, ["ending"])
            self._answer(call, [None] * len(samples), "", notes)
            if is_stubborn:
                print(f"a call of {self._verifiers[number].file} does not end when cancelled", flush=True)
                os._exit(STUBBORN)

    async def _run(
        self, verifier: AwaitedVerifier, group: ResponseGroup | str, samples: Sequence[int], notes: Notes
    ) -> tuple[Sequence[Verdict] | None, str]:
        """Return scores, or None and what was raised."""
        if isinstance(group, str):
            return None, group
        try:
            return await verifier.answer(group, samples, notes), ""
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # verifiers may raise anything
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return None, describe_error(error, verifier.file, self._printed)

    def _answer(self, call: int, scores: Sequence[Verdict] | None, error: str, notes: Notes) -> None:
        texts = [error, notes.text[:MAX_TEXT], notes.problem[:MAX_PROBLEM]]
        error, text, problem = (item.encode(errors="replace").decode() for item in texts)
        write_frame(self._sink, ["answer", call, scores, error, dict(notes.counts), text, problem])


if __name__ == "__main__":
    main()
