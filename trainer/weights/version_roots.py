"""Lets engines read the versions of a directory by URL: from a server of the trainer, or an object store."""

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
    return CopiedRoot(config.url, config.timeout_s)


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
            super().__init__(started.result(2 * START_S))
        except Exception as error:  # any that the server raises
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
    """A directory or an object store that versions are copied to, by fsspec."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Open it, without a read or write.

        Args:
            url: the directory's.
            timeout_s: limit for a copy with its removal if it fails, and for the removal of old versions.

        Raises:
            SettingsError: fsspec does not know the kind of URL.
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
            self._within(copy, lambda: self._try_to_remove([version.name]))
        except RemoteError as error:
            raise WeightError(str(error)) from error

    def remove(self, names: Sequence[str]) -> None:
        """Remove versions, or log why they stay; the rest of a removal in progress is made later."""
        try:
            self._within(lambda: self._try_to_remove(names), lambda: None)
        except RemoteError as error:
            log.warning("weights.not_removed versions=%s error=%s", ",".join(names), error)

    def _try_to_remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._store.remove(name)
            except RemoteError as error:
                log.warning("weights.not_removed version=%s error=%s", name, error)

    def _within(self, function: Callable[[], None], undo: Callable[[], None]) -> None:
        """Call in a thread that is left behind if it does not end in time. Raises RemoteError.

        Args:
            function: called in the thread.
            undo: called in the thread, too, if the function has ended too late.
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
            except InvalidStateError:  # given up meanwhile
                undo()

        # a daemon: a file system that hangs must not keep the process
        threading.Thread(target=call, name="weights-url", daemon=True).start()
        try:
            done.result(self._timeout_s)
        except TimeoutError as error:
            if done.cancel():
                limit = f"weights.timeout_s, {self._timeout_s:g} s"
                raise RemoteError(f"{self.location}: no answer within {limit}") from error
            done.result()
