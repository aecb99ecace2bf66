"""Lets engines read the versions of a directory by URL: from a server of the trainer, or an object store."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

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
"""Limit for starting and for closing the server."""


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
        self._listener = LimitedListener(max_connections=MAX_CONNECTIONS, header_s=HEADER_S, full=FULL)
        path, app = f"/{secrets.token_urlsafe(24)}", web.Application(middlewares=[self._listener.note])
        app.router.add_static(path, directory)
        logger = request_logger("tether.weights.http")
        self._runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=1.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights-http", daemon=True)
        self._thread.start()
        try:
            super().__init__(self._run(self._start(host)) + path)
        except OSError as error:
            self.close()
            raise WeightError(f"weights.host {host}: {error}") from error

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    async def _start(self, host: str) -> str:
        await self._runner.setup()
        return await self._listener.start(self._runner, host, 0)

    async def _stop(self) -> None:
        self._listener.close()
        await self._runner.cleanup()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)


class CopiedRoot(VersionRoot):
    """A directory or an object store that versions are copied to, by fsspec."""

    def __init__(self, url: str) -> None:
        """Open it; nothing is read or written. Raises SettingsError."""
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
