"""Proxies ZeroMQ frames over TCP and drops, duplicates, delays, swaps, cuts and damages messages.

One connection of a sender is one connection to the target, so that what ZeroMQ guarantees for a connection
holds unless a fault breaks it. Greetings and ZeroMQ's own commands pass unchanged.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from enum import StrEnum
from typing import Any

GREETING = 64
LONG, COMMAND = 2, 4


class Fault(StrEnum):
    """Fault of one message."""

    PASS = "pass"
    LOSE = "lose"
    REPEAT = "repeat"
    SWAP = "swap"  # it is held back until the next one has gone
    DELAY = "delay"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    CUT = "cut"  # the connection breaks in the middle of it


DELAY_S = 0.02


class Middle:
    """Listens at `endpoint` and connects to `target`.

    `plan`: faults of the next messages, in either direction; all later messages pass.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.endpoint = ""
        self.plan: deque[tuple[Fault, int]] = deque()
        """(fault, a number that says where a message is cut or damaged)."""
        self.damaged = 0
        """Messages that were truncated or corrupted so far."""
        self.connections = 0
        self.flowing = asyncio.Event()
        """While it is not set, nothing is passed on and nothing is closed: a link that hangs."""
        self.flowing.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Middle"]:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as accepted:
            listening.setblocking(False)
            self.endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
            async with asyncio.TaskGroup() as tasks:

                def accept() -> None:
                    with suppress(OSError):  # it is gone already
                        connection, _ = listening.accept()
                        accepted.enter_context(
                            connection
                        )  # a server of asyncio loses those that it is just accepting when the loop ends
                        connection.setblocking(False)
                        relay = tasks.create_task(self._relay(connection))
                        self._relays.add(relay)
                        relay.add_done_callback(self._relays.discard)

                loop.add_reader(listening, accept)
                try:
                    yield self
                finally:
                    loop.remove_reader(listening)
                    self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._open:
            writer.transport.abort()
        for relay in self._relays:
            relay.cancel()  # it may not have begun yet

    async def _relay(self, connection: socket.socket) -> None:
        host, _, port = self.target.removeprefix("tcp://").rpartition(":")
        with suppress(OSError):
            async with (
                self._opened(sock=connection) as (reader, writer),
                self._opened(host, int(port)) as (back_reader, back_writer),
            ):
                self.connections += 1
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass_on(reader, back_writer, writer))
                    both.create_task(self._pass_on(back_reader, writer, back_writer))

    @asynccontextmanager
    async def _opened(
        self, *where: Any, **how: Any
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection; it is closed completely at the end of the block."""
        reader, writer = await asyncio.open_connection(*where, **how)
        self._open.add(writer)
        try:
            yield reader, writer
        finally:
            self._open.discard(writer)
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: asyncio.StreamWriter
    ) -> None:
        kept = b""
        with suppress(OSError, asyncio.IncompleteReadError):
            # byte by byte: each end sends the rest of its greeting when it has the beginning of the other's
            for _ in range(GREETING):
                part = await reader.readexactly(1)
                if writer.is_closing():
                    raise ConnectionResetError
                writer.write(part)
            while True:
                flags, body = await _read(reader)
                await self.flowing.wait()
                if writer.is_closing():
                    break
                if flags & COMMAND or not self.plan:
                    writer.write(_frame(flags, body) + kept)
                    kept = b""
                    continue
                fault, number = self.plan.popleft()
                if fault is Fault.SWAP and not kept:
                    kept = _frame(flags, body)
                    continue
                if fault is Fault.CUT:
                    writer.write(_frame(flags, body)[: 1 + number % (len(body) + 1)])
                    break
                if fault is Fault.DELAY:
                    await asyncio.sleep(DELAY_S)
                writer.write(
                    b"".join(_frame(flags, changed) for changed in self._changed(fault, number, body)) + kept
                )
                kept = b""
        writer.close()  # what was written still goes out
        other.transport.abort()

    def _changed(self, fault: Fault, number: int, body: bytes) -> list[bytes]:
        """Return the messages that are sent in place of `body`."""
        if fault is Fault.LOSE:
            return []
        if fault is Fault.REPEAT:
            return [body, body]
        if fault is Fault.TRUNCATE:
            self.damaged += 1
            return [body[: number % max(1, len(body))]]
        if fault is Fault.CORRUPT and body:
            self.damaged += 1
            place = number % len(body)
            return [body[:place] + bytes([body[place] ^ (1 + number % 255)]) + body[place + 1 :]]
        return [body]


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return flags and body of the next frame."""
    flags = (await reader.readexactly(1))[0]
    length = (
        struct.unpack(">Q", await reader.readexactly(8))[0]
        if flags & LONG
        else (await reader.readexactly(1))[0]
    )
    return flags, await reader.readexactly(length)


def _frame(flags: int, body: bytes) -> bytes:
    size = struct.pack(">Q", len(body)) if len(body) > 255 else bytes([len(body)])
    return bytes([(flags & ~LONG) | (LONG if len(body) > 255 else 0)]) + size + body
