"""The relay to an endpoint ends with its sandbox."""

import asyncio
import contextlib
from pathlib import Path

from rollout.sandboxes.relay import Relay


async def test_closing_the_relay_closes_its_connections(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def endpoint(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        with contextlib.suppress(OSError):
            await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(endpoint, "127.0.0.1", 0) as server:
        relay = Relay(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await relay.open(tmp_path / "s")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        assert await reader.readexactly(5) == b"hello"
        async with asyncio.timeout(30):
            await relay.close()
            assert await reader.read() == b""
            await ended.wait()
        await relay.close()
        writer.close()
