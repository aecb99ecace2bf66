"""Starts, queries and ends one worker process, for the pool."""

import asyncio
import itertools
import logging
import sys
from asyncio.subprocess import PIPE
from collections.abc import Collection, Sequence
from typing import Any, cast

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.host.child_environment import child_environment
from reward.config import RewardConfig, VerifierConfig
from reward.sandbox.process_tree import kill_process_tree
from reward.workers.frames import LENGTH, MAX_FRAME, CallOutcome, GroupFrame, VerifierTraits

EXIT_S = 2.0
"""Time after the exit of a process in which its child processes may keep the pipe open, seconds."""
SILENCE_S = 5.0
"""Time beyond `timeout_s` after which a silent concurrent process is killed, seconds."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
log = logging.getLogger("tether.reward")


class WorkerEnded(Exception):
    """The process ended before it answered a call. Another call may be the cause."""

    def __init__(self, text: str, is_hung: bool, was_only_call: bool) -> None:
        super().__init__(text)
        self.is_hung = is_hung
        """Whether the process was killed because it hung for longer than a call may take."""
        self.was_only_call = was_only_call
        """Whether the process had no other call."""

    def outcome(self, samples: Sequence[int]) -> CallOutcome:
        """Return the outcome of the call that ended its process: a timeout if the process hung."""
        return CallOutcome([None] * len(samples)) if self.is_hung else CallOutcome([], error=str(self))


class WorkerClient(asyncio.SubprocessProtocol):
    """Client of a worker process, which runs one call at a time or, if concurrent, any number of calls.

    If `healthy` is False the process must be replaced.
    """

    def __init__(self, config: RewardConfig, is_concurrent: bool) -> None:
        self._config, self._is_concurrent = config, is_concurrent
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self._buffer = bytearray()
        self._ready: asyncio.Future[list[Any]] = self._loop.create_future()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[CallOutcome]] = {}
        self._numbers = itertools.count()
        self._groups: set[int] = set()
        self._heard_s = self._loop.time()
        self._is_hung = False
        self._abandoned: set[int] = set()
        """Cancelled calls that the process still runs. Each may be why the process hangs or ends."""
        self._is_blamed = False
        """Whether the process reported the call that ends it."""
        self._is_killed = False
        self.healthy = True
        self.traits: Sequence[VerifierTraits | None] = ()
        """Traits of each verifier; None if this process does not run the verifier."""

    @classmethod
    async def start(
        cls,
        config: RewardConfig,
        modules: Sequence[str],
        verifiers: Sequence[VerifierConfig | None],
        *,
        is_concurrent: bool,
        withheld: Collection[str] = (),
    ) -> "WorkerClient":
        """Start a process and wait until its verifiers are imported. Cancellation ends the process.

        Args:
            config: section `[reward]`.
            modules: directories of user modules, searched last.
            verifiers: verifiers of the section; None for each that this process does not import.
            is_concurrent: whether the process runs concurrent calls. A concurrent process supports only
                awaited verifiers, any other process only loaded verifiers.
            withheld: environment variables that the process does not inherit.

        Raises:
            SettingsError: a verifier's name or options are invalid.
            RewardError: the process ended, or was not ready within `start_timeout_s`.
        """
        program = [sys.executable, "-P", "-m", "reward.workers.worker"]
        _, worker = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(config, is_concurrent),
            *program,
            stdin=PIPE,
            stdout=PIPE,
            stderr=None,
            start_new_session=True,
            env=child_environment(ONE_THREAD, without=withheld),
        )
        named = [item and [item.name, item.options] for item in verifiers]
        try:
            worker._send([is_concurrent, config.memory_mb, config.timeout_s, list(modules), named])
            async with asyncio.timeout(config.start_timeout_s):
                kind, given = await worker._ready
            if kind != "ready":
                raise SettingsError(given)
            worker.traits = msgspec.convert(given, list[VerifierTraits | None])
        except TimeoutError:
            await worker.end()
            raise RewardError(
                f"a reward worker was not ready within reward.start_timeout_s {config.start_timeout_s}"
            ) from None
        except BaseException:
            await worker.end()
            raise
        return worker

    async def call(self, group: GroupFrame, verifier: int, samples: Sequence[int]) -> CallOutcome:
        """Return the outcome of one verifier on samples of a group.

        Cancellation cancels the call in a concurrent process, and ends any other process.

        Args:
            group: group of the samples, sent once until `forget`. A process that is not concurrent keeps one
                group.
            verifier: index of the verifier in the settings.
            samples: indices of the samples.

        Raises:
            WorkerEnded: the process ended, or hung and was killed.
        """
        number, answer = next(self._numbers), self._loop.create_future()
        self._calls[number] = answer
        began_s = self._loop.time()
        try:
            if not self.healthy:
                raise WorkerEnded("the worker process has ended", is_hung=False, was_only_call=False)
            self._open(group)
            self._send(["call", number, verifier, group.number, list(samples)])
            while not answer.done() and (left_s := self._deadline_s(began_s) - self._loop.time()) > 0:
                await asyncio.wait({answer}, timeout=left_s)
            if not answer.done():
                self._is_hung = True
                self.kill()
                await asyncio.wait({answer})
            outcome: CallOutcome = answer.result()
            if not outcome.error and len(outcome.scores) != len(samples):
                return CallOutcome([], error=f"{len(outcome.scores)} scores for {len(samples)} samples")
            return outcome
        finally:
            del self._calls[number]
            if not answer.done() and self.healthy:
                if self._is_concurrent:
                    self._abandoned.add(number)
                    self._send(["cancel", number])
                else:
                    await self.end()

    def forget(self, group: GroupFrame) -> None:
        """Let the process forget a scored group."""
        self._close_group(group.number)

    def kill(self) -> None:
        """Kill the process and all of its descendants. Later answers of the process are ignored.

        Descendants die first. A call that waits for a descendant would answer as if that had failed.
        """
        self.healthy, self._is_killed = False, True
        if self._transport is not None and not self._exited.done():
            kill_process_tree(self._transport.get_pid())

    async def end(self) -> None:
        """Kill the process and wait for its exit. Idempotent."""
        self.kill()
        await asyncio.wait({self._exited})
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport (called by asyncio)."""
        self._transport = cast(asyncio.SubprocessTransport, transport)  # uvloop's has no such base class

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Parse the output of the process (called by asyncio)."""
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
            except (
                TypeError,
                ValueError,
                msgspec.MsgspecError,
            ):  # only a verifier can have written this frame
                self.kill()
                return

    def process_exited(self) -> None:
        """Fail the unanswered calls, after the remaining output is read (called by asyncio)."""
        self.healthy = False
        self._loop.call_later(EXIT_S, self.connection_lost, None)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the unanswered calls (called by asyncio)."""
        if not self._exited.done():
            self._exited.set_result(None)
        code = None if self._transport is None else self._transport.get_returncode()
        if not self._ready.done():
            self._ready.set_exception(RewardError(f"a reward worker ended while starting, exit code {code}"))
        open_calls = [answer for answer in self._calls.values() if not answer.done()]
        if open_calls:
            log.warning("score.worker_ended code=%s calls=%d stuck=%s", code, len(open_calls), self._is_hung)
        was_only_call = len(self._calls) + len(self._abandoned) <= 1 and not self._is_blamed
        for answer in open_calls:
            answer.set_exception(
                WorkerEnded(f"the worker process ended, exit code {code}", self._is_hung, was_only_call)
            )

    def _deadline_s(self, began_s: float) -> float:
        """Return the time at which the process counts as hung: no output, or its only call timed out."""
        if self._is_concurrent:
            return max(began_s, self._heard_s) + self._config.timeout_s + SILENCE_S
        return began_s + self._config.timeout_s

    def _take(self, kind: str, *rest: Any) -> None:
        if self._is_killed:
            return
        if kind == "answer":
            number, outcome = rest
            self._abandoned.discard(number)
            answer = self._calls.get(number)
            if answer is not None and not answer.done():
                answer.set_result(msgspec.convert(outcome, CallOutcome))
        elif kind == "ending":
            self.healthy, self._is_blamed = False, True
        elif kind != "alive" and not self._ready.done():
            self._ready.set_result([kind, *rest])

    def _open(self, group: GroupFrame) -> None:
        if group.number in self._groups:
            return
        if not self._is_concurrent:
            for number in [*self._groups]:
                self._close_group(number)
        self._groups.add(group.number)
        self._send(["open", group.number, group.data])

    def _close_group(self, number: int) -> None:
        if number in self._groups and self.healthy:
            self._send(["close", number])
        self._groups.discard(number)

    def _send(self, frame: list[Any]) -> None:
        assert self._transport is not None
        data = msgspec.msgpack.encode(frame)
        pipe = cast(asyncio.WriteTransport | None, self._transport.get_pipe_transport(0))
        if pipe is not None and not pipe.is_closing():
            pipe.write(LENGTH.pack(len(data)) + data)
