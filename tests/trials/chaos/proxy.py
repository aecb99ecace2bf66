"""Proxies TCP and damages what passes: the links between the services of a run.

All connections of one link share its `Weather`. Bytes are never left out of a stream or reordered, as TCP
would not do either: a cut ends connections, a stall delays bytes, a truncation ends a connection in the
middle of a message. Corruption flips single bits, as bad memory or a bad network card does.
"""

import asyncio
import random
from dataclasses import dataclass, field

CHUNK = 16384
SLOW_CHUNK = 2048
SLOW_S = 0.03
CORRUPT_SHARE = 0.3
"""Share of the chunks in which a bit is flipped while the weather is `corrupt`."""


@dataclass
class Weather:
    """Faults that apply to the connections of a link at present; any of them at once."""

    rng: random.Random
    faults: list[str] = field(default_factory=list)
    """Names of the faults that are on: cut, stall, mute (what the server says is held back), slow, corrupt,
    truncate."""
    spoilt: int = 0
    """Chunks that were corrupted or truncated so far."""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, fault: str) -> None:
        """Begin a fault."""
        self.faults.append(fault)
        if fault == "cut":
            for writer in self._open:
                writer.transport.abort()
        self._change()

    def end(self, fault: str) -> None:
        """End a fault."""
        self.faults.remove(fault)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def passable(self, from_server: bool) -> None:
        """Wait while bytes in this direction are delayed."""
        while "stall" in self.faults or (from_server and "mute" in self.faults):
            await self._changed.wait()


class Proxy:
    """Listens at one address and forwards to another."""

    def __init__(self, weather: Weather, target: tuple[str, int]) -> None:
        self._weather = weather
        self._target = target
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port.

        Raises:
            OSError: if the address is taken.
        """
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening. Connections end when their ends do."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        weather = self._weather
        if "cut" in weather.faults:
            return writer.transport.abort()
        try:
            there_reader, there = await asyncio.open_connection(*self._target)
        except OSError:
            return writer.transport.abort()
        weather._open |= {writer, there}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(reader, there, from_server=False))
                tasks.create_task(self._forward(there_reader, writer, from_server=True))
        except* OSError:
            pass
        finally:
            weather._open -= {writer, there}
            writer.transport.abort()
            there.transport.abort()

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, from_server: bool
    ) -> None:
        weather = self._weather
        while True:
            chunk = await source.read(SLOW_CHUNK if "slow" in weather.faults else CHUNK)
            await weather.passable(from_server)
            if not chunk:
                raise ConnectionResetError("closed by an end")
            if "slow" in weather.faults:
                await asyncio.sleep(SLOW_S)
            if "corrupt" in weather.faults and weather.rng.random() < CORRUPT_SHARE:
                chunk = flipped(chunk, weather.rng)
                weather.spoilt += 1
            if "truncate" in weather.faults:
                weather.spoilt += 1
                sink.write(chunk[: len(chunk) // 2])
                await sink.drain()
                raise ConnectionResetError("truncated")
            sink.write(chunk)
            await sink.drain()


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one bit changed."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)
