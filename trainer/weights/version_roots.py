"""Makes the versions of a directory readable by URL: from a server in the trainer, or an object store."""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from protocol.errors import WeightError
from protocol.network.http_listener import LimitedListener, request_logger
from trainer.config import WeightConfig
from trainer.storage.remote import RemoteDirectory, RemoteError
from trainer.weights.version_directories import MANIFEST, VersionRoot, files_of

log = logging.getLogger("tether.weights")

MAX_CONNECTIONS = 4096
"""Maximum number of open connections; an engine rank opens up to eight."""
HEADER_S = 30.0
"""Timeout for the head of a connection's first request, seconds."""
FULL = b'{"error": "too many connections"}'
START_S = 60.0
"""Timeout for starting and for closing the server, seconds."""


def url_root(config: WeightConfig, directory: Path) -> VersionRoot:
    """Return the location where engines read versions by `http`.

    Raises:
        SettingsError: fsspec does not support `weights.url`, or lacks a package for it.
        WeightError: the trainer cannot serve the directory on `weights.host`.
    """
    if not config.url:
        return ServedRoot(directory, config.host)
    if config.url.startswith(("http://", "https://")):
        return VersionRoot(config.url.rstrip("/"))
    return CopiedRoot(config.url, config.timeout_s)


class ServedRoot(VersionRoot):
    """HTTP server of the directory in a thread of this process, with range requests.

    The URL path is a secret: engines get it from the manifest, which the bus and the ledger protect.
    """

    def __init__(self, directory: Path, host: str) -> None:
        """Listen on a free port. Raises WeightError."""
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(directory, host, started)),
            name="weights-http",
            daemon=True,
        )
        self._thread.start()
        try:
            super().__init__(started.result(2 * START_S))
        except Exception as error:  # the server may raise anything
            reason = str(error) or f"no server within {START_S:g} s"
            raise WeightError(f"weights.host {host}: {reason}") from error

    def add(self, version: Path) -> None:
        if not self._thread.is_alive():
            raise WeightError(
                f"version {version.name}: the server of weights.host has ended; the log says why"
            )

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(START_S)
            if self._thread.is_alive():
                log.error("weights.server_left seconds=%g", START_S)

    async def _serve(self, directory: Path, host: str, started: "Future[str]") -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        listener = LimitedListener(max_connections=MAX_CONNECTIONS, header_s=HEADER_S, full=FULL)
        path, app = f"/{secrets.token_urlsafe(24)}", web.Application(middlewares=[listener.note])
        logger = request_logger("tether.weights.http")
        runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=1.0)
        try:
            app.router.add_static(path, directory)
            async with asyncio.timeout(START_S):
                await runner.setup()
                location = await listener.start(runner, host, 0) + path
            started.set_result(location)
            await self._ended.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            listener.close()
            await runner.cleanup()


class CopiedRoot(VersionRoot):
    """Directory or object store to which versions are copied, by fsspec."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Create the file system, without reading or writing.

        Args:
            timeout_s: timeout for a copy including cleanup after a failure, and for removing old versions.

        Raises:
            SettingsError: fsspec does not support the URL.
        """
        super().__init__(url.rstrip("/"))
        self._store = RemoteDirectory(self.location, "weights.url")
        self._timeout_s = timeout_s

    def add(self, version: Path) -> None:
        end = time.monotonic() + self._timeout_s

        def copy() -> None:
            try:
                self._store.put_directory(version, version.name, MANIFEST, end, files_of(version))
            except RemoteError:
                self._try_to_remove([version.name])
                raise

        try:
            self._call_with_timeout(copy, lambda: self._try_to_remove([version.name]))
        except RemoteError as error:
            raise WeightError(str(error)) from error

    def remove(self, names: Sequence[str]) -> None:
        """Remove versions, or log why they stay; a removal that times out continues in its thread."""
        try:
            self._call_with_timeout(lambda: self._try_to_remove(names), lambda: None)
        except RemoteError as error:
            log.warning("weights.not_removed versions=%s error=%s", ",".join(names), error)

    def _try_to_remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._store.remove(name)
            except RemoteError as error:
                log.warning("weights.not_removed version=%s error=%s", name, error)

    def _call_with_timeout(self, function: Callable[[], None], undo: Callable[[], None]) -> None:
        """Call a function in a thread, which is abandoned after the timeout. Raises RemoteError.

        Args:
            undo: called in the thread if the function ended after the timeout.
        """
        done: Future[None] = Future()

        def call() -> None:
            try:
                function()
            except Exception as error:  # raised below
                with suppress(InvalidStateError):
                    done.set_exception(error)
                return
            try:
                done.set_result(None)
            except InvalidStateError:  # the caller has timed out
                undo()

        # daemon, so a hanging file system cannot block process exit
        threading.Thread(target=call, name="weights-url", daemon=True).start()
        try:
            done.result(self._timeout_s)
        except TimeoutError as error:
            if done.cancel():
                limit = f"weights.timeout_s, {self._timeout_s:g} s"
                raise RemoteError(f"{self.location}: no answer within {limit}") from error
            done.result()
