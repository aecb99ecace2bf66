"""A gate between one process and the ledger: it holds a script before it reaches the server, or its answer on
the way back.

What the process does between two calls of the ledger can so be cut at an exact place: kill it while the gate
is closed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit, urlunsplit

from services.ledger.redis.scripts import script
from tests.contracts.ledger_rig import SCRIPTS


class When(StrEnum):
    """Where the gate closes."""

    BEFORE = "before"
    """The request has not reached the server."""
    AFTER = "after"
    """The server has done it, its answer has not reached the process."""
    ANSWERED = "answered"
    """The answer has just reached the process."""


@dataclass(frozen=True)
class Spot:
    """The `nth` call of a script (or plain command), counted since the gate was set."""

    name: str
    when: When
    nth: int = 1


@dataclass
class Gate:
    """Where the process is held, and whether it has got there."""

    url: str
    spot: Spot | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: int = 0

    def close_at(self, spot: Spot) -> None:
        """Hold whoever comes to `spot` next, and release who is held now."""
        self.opened.set()
        self.spot, self._seen = spot, 0
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    def open(self) -> None:
        """Let everybody through."""
        self.spot = None
        self.opened.set()

    async def arrive(self, name: str, when: When, counted: bool) -> bool:
        """A call is at a place. Returns whether it was counted."""
        if self.spot is None or self.spot.name != name:
            return False
        if not counted:
            self._seen += 1
        if self.spot.when is when and self._seen == self.spot.nth:
            self.reached.set()
            await self.opened.wait()
        return True


SHAS = {script(name).sha.encode(): name for name in SCRIPTS}


@asynccontextmanager
async def gate_to(url: str) -> AsyncIterator[Gate]:
    """A gate before the server at `url`; its own URL is what the process is to be given."""
    parts = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                while True:
                    await _exchange(gate, reader, writer, up_reader, up_writer)
            finally:
                up_writer.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    gate = Gate(urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}")))
    try:
        yield gate
    finally:
        gate.open()
        server.close()


async def _exchange(
    gate: Gate,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    up_reader: asyncio.StreamReader,
    up_writer: asyncio.StreamWriter,
) -> None:
    """One request and its answer; a client of the ledger sends no second one before."""
    request, words = await _request(reader)
    command = words[0].upper()
    name = SHAS.get(words[1], "") if command == b"EVALSHA" else command.decode()
    counted = await gate.arrive(name, When.BEFORE, False)
    up_writer.write(request)
    answer = await _answer(up_reader)
    await gate.arrive(name, When.AFTER, counted)
    writer.write(answer)
    await writer.drain()
    await gate.arrive(name, When.ANSWERED, counted)


async def _request(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    head = await reader.readuntil(b"\r\n")
    raw, words = [head], []
    for _ in range(int(head[1:])):
        size = await reader.readuntil(b"\r\n")
        word = await reader.readexactly(int(size[1:]) + 2)
        raw += [size, word]
        words.append(word[:-2])
    return b"".join(raw), words


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """One RESP value, as bytes."""
    line = await reader.readuntil(b"\r\n")
    kind, rest = line[:1], line[1:-2]
    if kind in b"$=!" and int(rest) >= 0:
        return line + await reader.readexactly(int(rest) + 2)
    if kind in b"*~>%" and int(rest) > 0:
        items = int(rest) * (2 if kind == b"%" else 1)
        return line + b"".join([await _answer(reader) for _ in range(items)])
    return line
