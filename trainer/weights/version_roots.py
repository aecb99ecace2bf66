"""Lets engines read the versions of a directory by URL: from a server of the trainer, or an object store."""

import asyncio
import logging
import secrets
import threading
from concurrent.futures import Future
from pathlib import Path

from aiohttp import web

from protocol.errors import WeightError
from protocol.network.http_listener import LimitedListener, request_logger
from trainer.config import WeightConfig
from trainer.storage.remote import RemoteDirectory, RemoteError
from trainer.weights.version_directories import MANIFEST, VersionRoot

log = logging.getLogger("tether.weights")

MAX_CONNECTIONS = 4096
"""Connections open at once; an engine rank opens up to eight."""
HEADER_S = 30.0
"""How long a connection may take to send the head of its first request."""
FULL = b'{"error": "too many connections"}'
START_S = 60.0
"""Limit for starting and for closing the server, seconds."""


def url_root(config: WeightConfig, directory: Path) -> VersionRoot:
    """Return where engines read versions by `http`.

    Raises:
        SettingsError: fsspec does not know the kind of `weights.url`, or a package for it is missing.
        WeightError: the trainer cannot serve the directory on `weights.host`.
    """
    if not config.url:
        return ServedRoot(directory, config.host)
    if config.url.startswith(("http://", "https://")):
        return VersionRoot(config.url.rstrip("/"))
    return CopiedRoot(config.url)


class ServedRoot(VersionRoot):
    """The directory, served by HTTP from a thread of this process, by ranges.

    Its path is a secret: engines have it from the manifest, which the bus and the ledger protect.
    """

    def __init__(self, directory: Path, host: str) -> None:
        """Listen on any free port. Raises WeightError."""
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(directory, host, started)),
            name="weights-http",
            daemon=True,
        )
        self._thread.start()
        try:
            super().__init__(started.result(START_S))
        except OSError as error:
            raise WeightError(f"weights.host {host}: {error}") from error

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(START_S)

    async def _serve(self, directory: Path, host: str, started: "Future[str]") -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        listener = LimitedListener(max_connections=MAX_CONNECTIONS, header_s=HEADER_S, full=FULL)
        path, app = f"/{secrets.token_urlsafe(24)}", web.Application(middlewares=[listener.note])
        app.router.add_static(path, directory)
        logger = request_logger("tether.weights.http")
        runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=1.0)
        await runner.setup()
        try:
            started.set_result(await listener.start(runner, host, 0) + path)
            await self._ended.wait()
        except OSError as error:
            started.set_exception(error)
        finally:
            listener.close()
            await runner.cleanup()


class CopiedRoot(VersionRoot):
    """A directory or an object store that versions are copied to, by fsspec."""

    def __init__(self, url: str) -> None:
        """Open it, without a read or write. Raises SettingsError."""
        super().__init__(url.rstrip("/"))
        self._store = RemoteDirectory(self.location, "weights.url")

    def add(self, version: Path) -> None:
        try:
            self._store.put_directory(version, version.name, MANIFEST)
        except RemoteError as error:
            raise WeightError(str(error)) from error

    def remove(self, name: str) -> None:
        """Remove a version, or log why it stays."""
        try:
            self._store.remove(name)
        except RemoteError as error:
            log.warning("weights.not_removed version=%s error=%s", name, error)
