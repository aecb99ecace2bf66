"""Serves `/health` and `/metrics` of a service over HTTP, and the routes that the monitor adds."""

import logging
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from protocol.errors import SettingsError

_log = logging.getLogger("tether.http")
_log.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)  # otherwise port scanners fill the log

Health = Callable[[], Mapping[str, object]]
"""Facts about the service; `{"ok": False, ...}` makes /health answer 503."""


class HttpServer:
    """HTTP server for health and metrics on one port."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Health,
        routes: Mapping[str, Callable[[web.Request], object]] | None = None,
        middlewares: Sequence[Middleware] = (),
    ) -> None:
        self._registry = registry
        self._health = health
        self._app = web.Application(middlewares=middlewares)
        self._app.router.add_get("/health", self._serve_health)
        self._app.router.add_get("/metrics", self._serve_metrics)
        for path, handler in (routes or {}).items():
            self._app.router.add_get(path, handler)  # type: ignore[arg-type]
        self._runner = web.AppRunner(self._app, access_log=None, logger=_log, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> int:
        """Bind and serve.

        Args:
            host: address to bind.
            port: port to bind, or 0 for any free one.

        Returns:
            The port.

        Raises:
            SettingsError: the port is taken, or the host cannot be bound.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise SettingsError(
                f"cannot serve HTTP on {host}:{port}: {error.strerror or error}; "
                "choose another port, or 0 for any free one"
            ) from None
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop serving; running requests get a second to finish."""
        await self._runner.cleanup()

    async def _serve_health(self, request: web.Request) -> web.Response:
        facts = dict(self._health())
        return web.json_response(facts, status=200 if facts.get("ok", True) else 503)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )
