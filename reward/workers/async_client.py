"""Starts, queries and ends a process with verifiers that wait, for the pool."""

import asyncio
import itertools
import sys
from asyncio.subprocess import PIPE
from collections.abc import Collection, Sequence
from typing import Any, cast

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.host.process_tree import kill_process_tree
from reward.config import RewardConfig
from reward.workers.client import EXIT_S, LENGTH, MAX_FRAME, worker_environment
from reward.workers.outcome import CallOutcome, GroupFrame

SILENCE_S = 5.0
"""How much longer than `timeout_s` the event loop of a process may stand still, seconds."""
CHECK_S = 1.0
"""Time between two checks of that, seconds."""


class WorkerEnded(Exception):
    """The process ended before it answered a call, which may not be the one to blame."""

    def __init__(self, text: str, stuck: bool, alone: bool) -> None:
        super().__init__(text)
        self.stuck = stuck
        """Whether it was killed because its event loop stood still, for longer than a call may take."""
        self.alone = alone
        """Whether there was no other call in it."""


class AsyncWorkerClient(asyncio.SubprocessProtocol):
    """A worker process, which answers any number of calls at once, each when it is done.

    If `healthy` is False the process must be replaced.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config, self._loop = config, asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self._buffer = bytearray()
        self._ready: asyncio.Future[list[Any]] = self._loop.create_future()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[CallOutcome]] = {}
        self._numbers = itertools.count()
        self._groups: set[int] = set()
        self._heard_s = self._loop.time()
        self._stuck = False
        self._is_blamed = False
        """Whether the process said which call it ends for."""
        self.healthy = True

    @classmethod
    async def start(
        cls, config: RewardConfig, modules: Sequence[str], awaited: Collection[int]
    ) -> "AsyncWorkerClient":
        """Start a process and wait until it has imported its verifiers; cancelling the call ends it.

        Args:
            config: the section.
            modules: directories with modules of the user, which are searched last.
            awaited: numbers of the verifiers that wait; the others are not imported.

        Raises:
            SettingsError: a verifier's options are wrong.
            RewardError: it was not ready within `start_timeout_s`, or ended.
        """
        program = [sys.executable, "-P", "-m", "reward.workers.async_worker"]
        _, worker = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(config),
            *program,
            stdin=PIPE,
            stdout=PIPE,
            stderr=None,
            start_new_session=True,
            env=worker_environment(),
        )
        verifiers = [
            [verifier.name, verifier.options] if i in awaited else None
            for i, verifier in enumerate(config.verifiers)
        ]
        try:
            worker._send([config.memory_mb, config.timeout_s, list(modules), verifiers])
            async with asyncio.timeout(config.start_timeout_s):
                kind, *rest = await worker._ready
        except TimeoutError:
            await worker.end()
            raise RewardError(
                f"a reward worker was not ready within reward.start_timeout_s {config.start_timeout_s}"
            ) from None
        except BaseException:
            await worker.end()
            raise
        if kind != "ready":
            await worker.end()
            raise SettingsError(rest[0])
        return worker

    async def call(self, group: GroupFrame, verifier: int, samples: Sequence[int]) -> CallOutcome:
        """Return the scores that one verifier gives to samples of a group; cancelling it ends the call.

        Raises:
            WorkerEnded: the process ended, or its event loop stood still and it was killed.
        """
        number, answer = next(self._numbers), self._loop.create_future()
        self._calls[number] = answer
        try:
            if not self.healthy:
                raise WorkerEnded("the worker process has ended", stuck=False, alone=False)
            if group.number not in self._groups:
                self._groups.add(group.number)
                self._send(["open", group.number, group.data])
            self._send(["call", number, verifier, group.number, list(samples)])
            while not answer.done():
                await asyncio.wait({answer}, timeout=CHECK_S)
                if self._loop.time() - self._heard_s > self._config.timeout_s + SILENCE_S:
                    self._stuck = True
                    self.kill()
            outcome: CallOutcome = answer.result()
            if not outcome.error and len(outcome.scores) != len(samples):
                return CallOutcome([], error=f"{len(outcome.scores)} scores for {len(samples)} samples")
            return outcome
        finally:
            del self._calls[number]
            if not answer.done() and self.healthy:
                self._send(["cancel", number])

    def forget(self, group: GroupFrame) -> None:
        """Let the process forget a group that is scored."""
        if group.number in self._groups and self.healthy:
            self._send(["close", group.number])
        self._groups.discard(group.number)

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        self.healthy = False
        if self._transport is not None and not self._exited.done():
            kill_process_tree(self._transport.get_pid())

    async def end(self) -> None:
        """Kill the process and wait for its end. Idempotent."""
        self.kill()
        await asyncio.wait({self._exited})
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by asyncio)."""
        self._transport = cast(asyncio.SubprocessTransport, transport)  # uvloop's derives from nothing

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take what the process wrote (called by asyncio)."""
        self._buffer += data
        self._heard_s = self._loop.time()
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                self.kill()
                return
            if len(self._buffer) < LENGTH.size + length:
                return
            frame = bytes(self._buffer[LENGTH.size : LENGTH.size + length])
            del self._buffer[: LENGTH.size + length]
            try:
                self._take(*msgspec.msgpack.decode(frame, type=list[Any]))
            except (TypeError, ValueError, msgspec.MsgspecError):  # what only a verifier can have written
                self.kill()
                return

    def process_exited(self) -> None:
        """Fail what is not answered, once all that was written is read (called by asyncio)."""
        self.healthy = False
        self._loop.call_later(EXIT_S, self.connection_lost, None)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what is not answered (called by asyncio)."""
        if not self._exited.done():
            self._exited.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(
                RewardError(f"a reward worker ended while starting, exit code {self._exit_code()}")
            )
        ended = self._ended()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ended)

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "answer":
            number, scores, error, counts, text, problem = rest
            answer = self._calls.get(number)
            if answer is not None and not answer.done():
                given = msgspec.convert(scores or [], list[float | list[float] | None])
                answer.set_result(CallOutcome(given, error, counts, text, problem))
        elif kind == "ending":
            self.healthy, self._is_blamed = False, True
        elif kind != "alive" and not self._ready.done():
            self._ready.set_result([kind, *rest])

    def _exit_code(self) -> int | None:
        return None if self._transport is None else self._transport.get_returncode()

    def _ended(self) -> WorkerEnded:
        return WorkerEnded(
            f"the worker process ended, exit code {self._exit_code()}",
            self._stuck,
            alone=len(self._calls) <= 1 and not self._is_blamed,
        )

    def _send(self, frame: list[Any]) -> None:
        assert self._transport is not None
        data = msgspec.msgpack.encode(frame)
        pipe = cast(asyncio.WriteTransport | None, self._transport.get_pipe_transport(0))
        if pipe is not None and not pipe.is_closing():
            pipe.write(LENGTH.pack(len(data)) + data)
