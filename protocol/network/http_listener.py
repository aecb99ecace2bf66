"""Binds a web server, with limits on the number of connections and on the time until the first request."""

import asyncio
import errno
import logging
import ssl

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from protocol.network.addresses import bracketed

BACKLOG = 4096
"""Number of connections that may wait to be accepted; all harnesses of a worker may connect at once."""


def request_logger(name: str) -> logging.Logger:
    """Return a logger for aiohttp that drops records about malformed HTTP requests.

    Port scanners would fill the log, and a quoted request may contain a key in its path.
    """
    logger = logging.getLogger(name)
    if _is_not_bad_request not in logger.filters:
        logger.addFilter(_is_not_bad_request)
    return logger


def _is_not_bad_request(record: logging.LogRecord) -> bool:
    """Return whether a record does not report a malformed HTTP request."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


class LimitedListener:
    """Listener on one address for the application of a runner, with or without TLS."""

    def __init__(self, *, max_connections: int, header_s: float, full: bytes) -> None:
        """Create a listener without starting it.

        Args:
            max_connections: maximum number of open connections. A further connection gets status 503 and is
                closed.
            header_s: timeout for the head of a connection's first request, seconds. Slower connections are
                closed.
            full: body of the 503 response, JSON.
        """
        self._max, self._header_s, self._full = max_connections, header_s, full
        self._headless: set[web.RequestHandler] = set()
        """Connections that have not sent the head of a request, each for at most `header_s`."""
        self._server: asyncio.Server | None = None

    async def start(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        ports: int = 1,
        tls: ssl.SSLContext | None = None,
    ) -> str:
        """Bind the address, accept connections, and return the address as a URL.

        Args:
            host: address to bind; an IPv6 address with or without brackets.
            port: port to bind; 0: any free port.
            ports: number of consecutive ports, from `port`, to try if other processes use the first ones.
            tls: TLS context; None: no encryption. A handshake may take half of `header_s`.

        Raises:
            OSError: host or port cannot be bound.
        """
        loop, server = asyncio.get_running_loop(), runner.server
        if server is None:
            raise RuntimeError("the runner is not set up")
        served = server

        def connected() -> asyncio.Protocol:
            if self._is_full(len(served.connections), counts_headless=tls is not None):
                return _Full(self._full)
            handler = served()
            self._headless.add(handler)
            loop.call_later(self._header_s, self._close_headless, handler)
            return handler

        for number in range(port, port + ports):
            try:
                self._server = await loop.create_server(
                    connected, host.strip("[]"), number, backlog=BACKLOG, ssl=tls,
                    ssl_handshake_timeout=self._header_s / 2 if tls else None,
                )  # fmt: skip
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or number == port + ports - 1:
                    raise
        assert self._server is not None
        found = self._server.sockets[0].getsockname()
        return f"{'https' if tls else 'http'}://{bracketed(found[0])}:{found[1]}"

    def _is_full(self, connected: int, *, counts_headless: bool) -> bool:
        """Return whether one more connection exceeds the limit.

        With TLS, the runner counts a connection only from the end of its handshake. A connection without a
        head therefore counts for `header_s`, even if it is already closed.
        """
        return connected >= self._max or (
            counts_headless
            and connected + len(self._headless) >= self._max
            and connected + sum(handler.transport is None for handler in self._headless) >= self._max
        )

    def close(self) -> None:
        """Stop accepting connections. Idempotent."""
        if self._server is not None:
            self._server.close()

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record that a connection has sent a request; must be a middleware of the application."""
        self._headless.discard(request.protocol)
        return await handler(request)

    def _close_headless(self, handler: web.RequestHandler) -> None:
        if handler in self._headless:
            self._headless.remove(handler)
            if handler.transport is not None:
                handler.transport.abort()


class _Full(asyncio.Protocol):
    """Protocol that answers status 503."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        )
        if isinstance(transport, asyncio.WriteTransport):
            transport.write(head.encode() + self._body)
            transport.close()
