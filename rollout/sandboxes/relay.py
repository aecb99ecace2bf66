"""Lets a sandbox without a network reach only the endpoint of its session.

A Unix socket mounted into the sandbox is forwarded to the endpoint's port on loopback.
"""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

from yarl import URL

from protocol.errors import SettingsError
from protocol.network.addresses import is_loopback

CONNECTIONS = 64
"""Maximum concurrent connections of a sandbox; further ones are closed."""
CHUNK = 1 << 16


class Relay:
    """Unix socket that forwards to a port."""

    def __init__(self, endpoint: str) -> None:
        """Args: endpoint: URL on this machine's loopback.

        Raises:
            SettingsError: the URL is not on loopback, so a sandbox without a network cannot reach it.
        """
        url = URL(endpoint)
        if not is_loopback(url.host or ""):
            raise SettingsError(
                f"setting environment.host: a sandbox reaches the endpoint on loopback, not {url.host}; "
                "leave environment.host and environment.advertise as they are"
            )
        self.host, self.port = str(url.host), int(url.port or 0)
        self._server: asyncio.Server | None = None
        self._open = set[asyncio.Task[None]]()
        self._closed = False

    async def open(self, path: Path) -> None:
        """Listen at a path that the sandbox's user may connect to."""
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # a socket path is limited to 107 bytes
        try:
            near = socket.socket(socket.AF_UNIX)
            near.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        self._server = await asyncio.start_unix_server(self._connected, sock=near)

    async def close(self) -> None:
        """Close the socket and its connections."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes in both directions until either end closes."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if self._closed or len(self._open) > CONNECTIONS:
                return
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
                try:
                    await _either(_carry(reader, far_writer), _carry(far_reader, writer))
                finally:
                    self._end(far_writer)
        finally:
            self._open.discard(task)
            self._end(writer)

    def _end(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection: immediately if the relay is closed, otherwise after pending bytes."""
        if self._closed:
            writer.transport.abort()
        else:
            writer.close()


async def _either(*carriers: "asyncio._CoroutineLike[None]") -> None:
    """Wait until one carrier ends, then cancel the other."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(carrier, name="sandbox.relay") for carrier in carriers]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
