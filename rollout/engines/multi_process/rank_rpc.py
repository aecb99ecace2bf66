"""Calls from the engine's process to its ranks over Unix sockets, for what the engine itself offers no such
call.

    engine -> rank   a call: (number, method, arguments)
    rank -> engine   an answer: (number, value, error), one from every rank

A frame is its length in 4 bytes, big endian, and one msgpack value. A call goes to rank 0 alone, which passes
it on to the others at a place where all of them stand between the same two steps; or, where that does not
matter, to every rank.
"""

import asyncio
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from protocol.errors import EngineError

MAX_FRAME = 64 << 20
"""Bytes; a manifest of a thousand tensors has a tenth of a megabyte."""
SEND_S = 10
"""For the engine's process to take an answer, before its connection counts as lost."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What the engine's process wants of every rank."""

    number: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says: a plain value, or why there is none."""

    number: int
    value: Any = None
    error: str = ""


class RankRpcServer:
    """A rank's end. Reads calls in a thread of its own; one connection at a time."""

    def __init__(self, path: Path, arrived: Callable[[Call], None]) -> None:
        """`arrived` is called in the reading thread."""
        self._arrived = arrived
        self._connection: socket.socket | None = None
        self._met = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        threading.Thread(target=self._run, name="tether-calls", daemon=True).start()

    def answer(self, answer: Answer) -> None:
        """Send an answer; lost if nobody is connected any more.

        A call may come by rank 0 before this rank's thread has taken the connection that the answer goes
        over: wait for it.
        """
        self._met.wait(SEND_S)
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.sendall(frame(answer))

    def carry_out(self, call: Call, method: Callable[..., Any]) -> None:
        """Do what a call asks for and answer it."""
        try:
            answer = Answer(call.number, method(*call.arguments))
        except Exception as error:  # whatever it is, the engine's process is told, and decides
            answer = Answer(call.number, error=f"{call.method}: {type(error).__name__}: {error}")
        self.answer(answer)

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
            with connection, suppress(OSError, msgspec.MsgspecError):
                self._connection = connection
                self._met.set()
                while head := _exactly(connection, 4):
                    body = _exactly(connection, _length(head))
                    self._arrived(msgspec.msgpack.decode(body, type=Call))
            self._connection = None


class RankRpcClient:
    """The engine's end: one connection to each rank."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called once, when a rank's connection ends that was not closed here."""
        self._on_lost: Callable[[], None] | None = on_lost
        self._numbers = itertools.count()
        self._lines: list[_Connection] = []

    async def connect(self, paths: Sequence[Path]) -> None:
        """Connect to every rank's socket. Raises EngineError if one is not there."""
        loop = asyncio.get_running_loop()
        for path in paths:
            try:
                _, line = await loop.create_unix_connection(lambda: _Connection(self._lost), str(path))
            except OSError as error:
                raise EngineError(f"no answer at {path}: {error}") from error
            self._lines.append(line)

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks to a call that rank 0 passes on. A cancelled call is carried out all the
        same.

        Raises:
            EngineError: a rank could not do it, or is gone.
        """
        return await self._answers(self._lines[:1], method, arguments)

    async def call_each(self, method: str, *arguments: Any) -> list[Any]:
        """The same of a call that goes to every rank."""
        return await self._answers(self._lines, method, arguments)

    async def _answers(
        self, asked: Sequence["_Connection"], method: str, arguments: Sequence[Any]
    ) -> list[Any]:
        if not asked:
            raise EngineError("not connected")
        number = next(self._numbers)
        waiting = [line.expect(number) for line in self._lines]
        try:
            for line in asked:
                line.send(Call(number, method, list(arguments)))
            answers = [await future for future in waiting]
        finally:
            for line in self._lines:
                line.forget(number)
        for rank, answer in enumerate(answers):
            if answer.error:
                raise EngineError(f"rank {rank}: {answer.error}")
        return [answer.value for answer in answers]

    def close(self) -> None:
        """Close all connections."""
        self._on_lost = None
        for line in self._lines:
            line.close()
        self._lines = []

    def _lost(self) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()


class _Connection(asyncio.Protocol):
    """One connection: frames in, futures out."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._data = bytearray()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while len(self._data) >= 4 and len(self._data) >= (end := 4 + _length(self._data[:4])):
                answer = msgspec.msgpack.decode(self._data[4:end], type=Answer)
                del self._data[:end]
                future = self._waiting.get(answer.number)
                if future is not None and not future.done():
                    future.set_result(answer)
        except (OSError, msgspec.MsgspecError):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineError("the rank's process is gone"))
        self._lost()

    def expect(self, number: int) -> "asyncio.Future[Answer]":
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            future.set_exception(EngineError("the rank's process is gone"))
        return future

    def forget(self, number: int) -> None:
        future = self._waiting.pop(number)
        if future.done() and not future.cancelled():
            future.exception()  # raised already, or of no interest any more
        future.cancel()

    def send(self, call: Call) -> None:
        if self._transport is not None:
            self._transport.write(frame(call))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def frame(message: Call | Answer) -> bytes:
    """A message as it goes over the socket."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def socket_path(directory: Path, rank: int) -> Path:
    """Where a rank listens."""
    return directory / f"rank{rank}.sock"


def _length(head: bytes | bytearray) -> int:
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME:
        raise OSError(f"a frame of {length} bytes")
    return length


def _exactly(connection: socket.socket, count: int) -> bytes:
    """`count` bytes; none at the end of the stream."""
    data = b""
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return data
