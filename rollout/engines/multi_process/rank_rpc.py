"""Calls methods of ranks from the engine's process over Unix sockets.

It is used for operations that the engine's own API lacks.

    engine -> rank   a call: (number, method, arguments)
    rank -> engine   an answer: (number, value, error), one from every rank

A frame is a 4-byte big-endian length followed by one msgpack value. Calls that must run between the same two
steps on all ranks are sent to rank 0, which broadcasts them. Other calls are sent to every rank.
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

from protocol.errors import EngineError, EngineSettingsError, SettingsError

CALL_TIMEOUT_S = 60.0
"""Default timeout for the answers of all ranks, seconds; a step on a loaded CPU can take seconds."""
MAX_FRAME = 64 << 20
"""Maximum frame size, bytes; a manifest of a thousand tensors takes about 0.1 MB."""
MAX_VALUE = MAX_FRAME - 64
"""Maximum size of an answer's value, bytes; excludes its number."""
SEND_S = 10
"""Timeout for sending an answer to the engine's process, seconds; then the connection counts as lost."""


class RankCall(msgspec.Struct, frozen=True, array_like=True):
    """Call of a method on every rank."""

    number: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answer of one rank: a plain value, or an error."""

    number: int
    value: Any = None
    error: str = ""


def start_error(reason: str) -> type[EngineError]:
    """Return the exception type for a failed start, from a rank's report of its error."""
    return EngineSettingsError if SettingsError.__name__ in reason else EngineError


class RankRpcServer:
    """Server of a rank; reads calls in its own thread, from one connection at a time."""

    def __init__(self, path: Path, arrived: Callable[[RankCall], None]) -> None:
        """Listen at `path`; `arrived` is called in the reading thread."""
        self._arrived = arrived
        self._connection: socket.socket | None = None
        self._connected = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        threading.Thread(target=self._run, name="tether-calls", daemon=True).start()

    def answer(self, answer: Answer) -> None:
        """Send an answer; drop it if the connection has closed.

        A call may arrive through rank 0 before this rank's thread has accepted its own connection, so this
        waits for the connection.
        """
        self._connected.wait(SEND_S)
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.sendall(frame(answer))

    def carry_out(self, call: RankCall, method: Callable[..., Any]) -> None:
        """Run `method` with the call's arguments and send the answer."""
        try:
            answer = Answer(call.number, method(*call.arguments))
        except Exception as error:  # the engine's process decides how to handle errors
            answer = Answer(call.number, error=f"{call.method}: {type(error).__name__}: {error}")
        self.answer(answer)

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
            with connection, suppress(OSError, msgspec.MsgspecError):
                self._connection = connection
                self._connected.set()
                while head := _receive_exactly(connection, 4):
                    body = _receive_exactly(connection, _body_length(head))
                    self._arrived(msgspec.msgpack.decode(body, type=RankCall))
            self._connection = None


class RankRpcClient:
    """Client in the engine's process, with one connection per rank."""

    def __init__(self, engine: str, on_lost: Callable[[], None], timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Create a client that is not connected.

        Args:
            engine: engine name, for errors.
            on_lost: called once, when a rank closes its connection.
            timeout_s: timeout for the answers of all ranks, seconds.
        """
        self._timeout_s = timeout_s
        self._engine = engine
        self._on_lost: Callable[[], None] | None = on_lost
        self._numbers = itertools.count()
        self._connections: list[_Connection] = []

    async def connect(self, paths: Sequence[Path]) -> None:
        """Connect to every rank's socket.

        Raises:
            EngineError: a rank does not listen.
        """
        loop = asyncio.get_running_loop()
        for path in paths:
            try:
                _, connection = await loop.create_unix_connection(lambda: _Connection(self._lost), str(path))
            except OSError as error:
                raise EngineError(f"no answer at {path}: {error}") from error
            self._connections.append(connection)

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Send a call to rank 0, which broadcasts it, and return the answers of all ranks.

        Cancelling the call does not stop the ranks from executing it.

        Raises:
            EngineError: a rank raised, has ended, or did not answer in time.
        """
        return await self._call(self._connections[:1], self._connections, method, arguments)

    async def call_each(self, method: str, *arguments: Any) -> list[Any]:
        """Send a call to every rank and return their answers; otherwise like `call`."""
        return await self._call(self._connections, self._connections, method, arguments)

    def close(self) -> None:
        """Close all connections."""
        self._on_lost = None
        for connection in self._connections:
            connection.close()
        self._connections = []

    async def _call(
        self,
        receivers: Sequence["_Connection"],
        answering: Sequence["_Connection"],
        method: str,
        arguments: Sequence[Any],
    ) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._answers(receivers, answering, method, arguments)
        except TimeoutError:
            raise EngineError(
                f"engine {self._engine}: no answer to {method} within {self._timeout_s:g} s"
            ) from None
        except EngineError as error:
            raise EngineError(f"engine {self._engine}: {error}") from error

    async def _answers(
        self,
        receivers: Sequence["_Connection"],
        answering: Sequence["_Connection"],
        method: str,
        arguments: Sequence[Any],
    ) -> list[Any]:
        if not receivers:
            raise EngineError("not connected")
        number = next(self._numbers)
        waiting = [connection.expect(number) for connection in answering]
        try:
            for connection in receivers:
                connection.send(RankCall(number, method, list(arguments)))
            answers = [await future for future in waiting]
        finally:
            for connection in answering:
                connection.forget(number)
        for rank, answer in enumerate(answers):
            if answer.error:
                raise EngineError(f"rank {rank}: {answer.error}")
        return [answer.value for answer in answers]

    def _lost(self) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()


class _Connection(asyncio.Protocol):
    """Connection to one rank: decodes frames and resolves the futures of their calls."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._data = bytearray()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not subclass it

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while len(self._data) >= 4 and len(self._data) >= (end := 4 + _body_length(self._data[:4])):
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
                future.set_exception(EngineError("the rank's process has ended"))
        self._lost()

    def expect(self, number: int) -> "asyncio.Future[Answer]":
        """Return a future for the answer to call `number`."""
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            future.set_exception(EngineError("the rank's process has ended"))
        return future

    def forget(self, number: int) -> None:
        """Drop the future of call `number`; a late answer is ignored."""
        future = self._waiting.pop(number)
        if future.done() and not future.cancelled():
            future.exception()  # mark the exception as retrieved
        future.cancel()

    def send(self, call: RankCall) -> None:
        """Send a call if the rank is still connected."""
        if self._transport is not None:
            self._transport.write(frame(call))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def frame(message: RankCall | Answer) -> bytes:
    """Encode a message as a frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def socket_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's socket."""
    return directory / f"rank{rank}.sock"


def _body_length(head: bytes | bytearray) -> int:
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME:
        raise OSError(f"a frame of {length} bytes")
    return length


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Receive `count` bytes; empty at the end of the stream."""
    data = b""
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return data
