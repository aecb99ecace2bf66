"""Runs verifiers in a worker process: `python -m reward.workers.worker`, started by `client.py`.

Frames in both directions: 4 bytes of length, little-endian, and a MessagePack array.

    in   [is_concurrent, memory_mb, timeout_s, modules, [[verifier, options] or nil, ...]]    once
    out  ["ready", [traits or nil, ...]] or ["settings", text]                  once, all imported and loaded
    in   ["open", group, frame]       a group; the frame is an array: prompt_text, responses, metadata,
                                      token_counts, finish_reasons, turns, contexts
    in   ["close", group]             the group is scored
    in   ["call", call, verifier, group, [sample, ...]]
    in   ["cancel", call]             the call is still answered, without scores
    out  ["answer", call, outcome]    a `CallOutcome`

A process that is not concurrent runs loaded verifiers: one call at a time, without an event loop, because a
user's function may run its own. The client limits the time of a call. A concurrent process runs awaited
verifiers (`AwaitedVerifier`), limits their time itself, and also writes

    out  ["alive"]                    every `ALIVE_S`: the event loop runs
    out  ["ending"]                   the process ends after its next answer, which is for the faulty call
"""

import asyncio
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.host.call_threads import CallThreads, Futures
from protocol.host.prctl import die_with_parent, keep_private
from protocol.msgpack_limits import METADATA_DEPTH, check_shape
from protocol.user_code import place_of
from reward.group import ResponseGroup
from reward.verifiers.base import AwaitedVerifier, LoadedVerifier, Notes
from reward.verifiers.registry import make_verifier
from reward.workers.frames import LENGTH, CallOutcome, VerifierTraits

ALIVE_S = 0.5
GRACE_S = 1.0
"""Time for a cancelled call to end, seconds; afterwards the process exits."""
MAX_ERROR = 500
"""Maximum number of characters of an error in a frame."""
MAX_TEXT = 2000
"""Maximum number of characters of a judge's answer in a frame."""
MAX_PROBLEM = 300
MAX_TRACES = 100
"""Maximum number of distinct exceptions with a printed traceback."""
EXIT_UNCANCELLABLE = 77
"""Exit code of a process with a call that does not end after cancellation."""
Verifiers = Sequence[LoadedVerifier | AwaitedVerifier | None]


def main() -> None:
    """Serve until standard input ends or the parent dies."""
    die_with_parent(signal.SIGKILL)
    keep_private()  # environment variables may contain a judge's key
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # verifiers and their subprocesses must not read frames
    os.dup2(2, 1)  # redirect output of verifiers to the log, away from the frames
    is_concurrent, memory_mb, timeout_s, modules, configs = _read_frame(source)
    sys.path.extend(modules)  # last, so user modules shadow none of tether's
    try:
        verifiers = [make_verifier(*item) if item else None for item in configs]
        loaded = _load(verifiers, memory_mb)
    except SettingsError as error:
        _write_frame(sink, ["settings", str(error)])
        return
    if memory_mb:
        limit = (memory_mb << 20) + loaded
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write_frame(sink, ["ready", [_traits(verifier) for verifier in verifiers]])
    server = _Server(verifiers, timeout_s, sink)
    if is_concurrent:
        asyncio.run(server.serve_concurrently(source))
    else:
        server.serve(source)


def _load(verifiers: Verifiers, memory_mb: int) -> int:
    """Load the verifiers; return the address space that they occupy, in bytes, to be added to the limit.

    Raises:
        SettingsError: loading failed, or a verifier cannot run under a memory limit.
    """
    loading = [item for item in verifiers if item is not None and not isinstance(item, AwaitedVerifier)]
    if memory_mb and any(verifier.maps_device_memory for verifier in loading):
        raise SettingsError(
            f"setting reward.memory_mb: {memory_mb} limits address space, and a verifier on a GPU maps more "
            "than it uses: set it to 0"
        )
    before = _mapped()
    for verifier in loading:
        verifier.load()
    return max(0, _mapped() - before)


def _mapped() -> int:
    """Return the size of this process's address space, bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _traits(verifier: LoadedVerifier | AwaitedVerifier | None) -> VerifierTraits | None:
    if verifier is None:
        return None
    return VerifierTraits(verifier.at_once, isinstance(verifier, AwaitedVerifier), verifier.by_turn)


class _Server:
    """Server for the calls of one client."""

    def __init__(self, verifiers: Verifiers, timeout_s: float, sink: BinaryIO) -> None:
        self._verifiers, self._timeout_s, self._sink = verifiers, timeout_s, sink
        self._groups: dict[int, ResponseGroup | str] = {}
        """Number of a group -> group, or the error in its metadata."""
        self._slots = {
            i: asyncio.Semaphore(item.max_running)
            for i, item in enumerate(verifiers)
            if isinstance(item, AwaitedVerifier)
        }
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._threads = CallThreads()
        self._printed: set[str] = set()

    def serve(self, source: BinaryIO) -> None:
        """Answer one call at a time until the stream ends."""
        while (frame := _read_frame(source)) is not None:
            kind, number, *rest = frame
            if kind == "call":
                self._answer(number, *self._compute(*rest), Notes())
            else:
                self._keep(kind, number, *rest)

    async def serve_concurrently(self, source: BinaryIO) -> None:
        """Run calls concurrently until the stream ends, then exit the process."""
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), source
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._alive_loop(), name="alive")
            while True:
                try:
                    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
                    kind, number, *rest = msgspec.msgpack.decode(await stream.readexactly(length))
                except asyncio.IncompleteReadError:
                    os._exit(0)
                if kind == "call":
                    self._begin(tasks, number, *rest)
                else:
                    self._keep(kind, number, *rest)

    def _keep(self, kind: str, number: int, *rest: Any) -> None:
        """Store or drop a group, or cancel a call."""
        if kind == "open":
            self._groups[number] = _decode_group(*msgspec.msgpack.decode(rest[0]))
        elif kind == "close":
            self._groups.pop(number, None)
        elif task := self._calls.get(number):
            task.cancel()

    def _compute(self, number: int, group: int, samples: Sequence[int]) -> tuple[Sequence[Any], str]:
        """Return the scores of a loaded verifier, or its exception as text."""
        verifier, known = self._verifiers[number], self._groups[group]
        assert verifier is not None
        assert not isinstance(verifier, AwaitedVerifier)
        if isinstance(known, str):
            return [], known
        try:
            return verifier.score(known, samples), ""
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # verifiers may raise anything
            return [], self._describe(error, verifier.file)

    async def _alive_loop(self) -> None:
        while True:
            _write_frame(self._sink, ["alive"])
            await asyncio.sleep(ALIVE_S)

    def _begin(
        self, tasks: asyncio.TaskGroup, call: int, number: int, group: int, samples: Sequence[int]
    ) -> None:
        task = tasks.create_task(
            self._bounded(tasks, call, number, self._groups[group], samples), name=f"call-{call}"
        )
        self._calls[call] = task
        task.add_done_callback(lambda _: self._forget_call(call, task))

    def _forget_call(self, call: int, task: asyncio.Task[None]) -> None:
        del self._calls[call]
        if task.cancelled():  # while it waited for a slot
            self._answer(call, [], "", Notes())

    async def _bounded(
        self,
        tasks: asyncio.TaskGroup,
        call: int,
        number: int,
        group: ResponseGroup | str,
        samples: Sequence[int],
    ) -> None:
        """Answer one call, at most `timeout_s` and `GRACE_S` after it acquires a slot."""
        notes, futures = Notes(), Futures()
        async with self._slots[number]:
            running = tasks.create_task(
                self._wait(number, group, samples, notes, futures), name=f"run-{call}"
            )
            with suppress(asyncio.CancelledError):  # the answer is unwanted, but the call must still end
                await asyncio.wait({running}, timeout=self._timeout_s)
            is_late = not running.done()
            running.cancel()
            if not is_late:
                self._answer(call, *running.result(), notes)
                return
            await asyncio.wait({running}, timeout=GRACE_S)
            is_uncancellable = self._threads.abandon(futures) or not running.done()
            if is_uncancellable:
                _write_frame(self._sink, ["ending"])
            self._answer(call, [None] * len(samples), "", notes)
            if is_uncancellable:
                verifier = self._verifiers[number]
                print(f"calls of {verifier and verifier.file} do not end when cancelled", flush=True)
                os._exit(EXIT_UNCANCELLABLE)

    async def _wait(
        self, number: int, group: ResponseGroup | str, samples: Sequence[int], notes: Notes, futures: Futures
    ) -> tuple[Sequence[Any], str]:
        """Return the scores of an awaited verifier, or its exception as text; `futures` has its threads."""
        verifier = self._verifiers[number]
        assert isinstance(verifier, AwaitedVerifier)
        self._threads.follow(futures)
        if isinstance(group, str):
            return [], group
        try:
            return await verifier.answer(group, samples, notes), ""
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # verifiers may raise anything
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return [], self._describe(error, verifier.file)

    def _answer(self, call: int, scores: Sequence[Any], error: str, notes: Notes) -> None:
        texts = [error, notes.text[:MAX_TEXT], notes.problem[:MAX_PROBLEM]]
        # a lone surrogate cannot be encoded
        error, text, problem = (item.encode(errors="replace").decode() for item in texts)
        outcome = CallOutcome(scores, error, dict(notes.counts), text, problem)
        _write_frame(self._sink, ["answer", call, outcome])

    def _describe(self, error: BaseException, file: str) -> str:
        """Return a verifier's exception as text; print the traceback of each new one from the user's code.

        Args:
            error: exception of the verifier.
            file: user file of the verifier, or "".
        """
        text = f"{type(error).__name__}: {error}"
        if file and not isinstance(error, RewardError):
            place = place_of(error, file)
            text = f"{place}: {text}" if place else text
            if place not in self._printed and len(self._printed) < MAX_TRACES:
                self._printed.add(place)
                traceback.print_exception(error)
        return text[:MAX_ERROR]


def _decode_group(
    prompt_text: str,
    responses: list[str],
    packed: bytes,
    token_counts: list[int],
    finish_reasons: list[str],
    turns: list[list[str]],
    contexts: list[list[str]],
) -> ResponseGroup | str:
    """Return the group of a frame, or the error in its metadata."""
    try:
        check_shape(packed, max_depth=METADATA_DEPTH)
        metadata = msgspec.msgpack.decode(packed, type=dict[str, Any])
    except Exception as error:  # the decoder may raise any exception
        return f"{type(error).__name__}: {error}"[:MAX_ERROR]
    return ResponseGroup(prompt_text, responses, metadata, token_counts, finish_reasons, turns, contexts)


def _read_frame(source: BinaryIO) -> Any:
    """Return the next frame, or None at the end of the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(source.read(*LENGTH.unpack(head)))


def _write_frame(sink: BinaryIO, frame: list[Any]) -> None:
    """Write a frame."""
    data = msgspec.msgpack.encode(frame)
    sink.write(LENGTH.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main()
