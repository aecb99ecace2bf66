"""Serves `/health` and `/metrics` of a service over HTTP, and the routes that the monitor adds."""

from collections.abc import Callable, Mapping, Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from yarl import URL

from protocol.errors import SettingsError, error_text
from protocol.network.addresses import is_loopback
from protocol.network.http_listener import LimitedListener, request_logger

_log = request_logger("tether.http")

MAX_CONNECTIONS = 512
"""Maximum number of open connections; a browser or a Prometheus server opens a few."""
HEADER_S = 30.0
"""Timeout in seconds for the head of a connection's first request."""
FULL = b'{"ok": false, "error": "too many connections"}'
Health = Callable[[], Mapping[str, object]]
"""Returns facts about the service; `{"ok": False, ...}` makes /health answer 503."""


class HttpServer:
    """HTTP server for health and metrics on one port."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Health,
        routes: Mapping[str, Callable[[web.Request], object]] | None = None,
        middlewares: Sequence[Middleware] = (),
        *,
        max_connections: int = MAX_CONNECTIONS,
        header_s: float = HEADER_S,
    ) -> None:
        """Create a server without starting it.

        Args:
            registry: metrics for /metrics.
            health: returns the answer of /health.
            routes: additional paths -> handlers.
            middlewares: access control; by default everyone has access, on loopback only by loopback host
                names.
            max_connections: as for `LimitedListener`.
            header_s: as for `LimitedListener`.
        """
        self._registry = registry
        self._health = health
        self._listener = LimitedListener(max_connections=max_connections, header_s=header_s, full=FULL)
        self._host = ""
        self._app = web.Application(
            middlewares=[self._listener.note, *(middlewares or [self._refuse_other_names])]
        )
        self._app.router.add_get("/health", self._serve_health)
        self._app.router.add_get("/metrics", self._serve_metrics)
        for path, handler in (routes or {}).items():
            self._app.router.add_get(path, handler)  # type: ignore[arg-type]
        self._runner = web.AppRunner(self._app, access_log=None, logger=_log, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; return the port.

        Args:
            host: address to bind.
            port: port to bind, or 0 for any free port.

        Raises:
            SettingsError: the port is in use, or the host cannot be bound.
        """
        self._host = host
        await self._runner.setup()
        try:
            address = await self._listener.start(self._runner, host, port)
        except OSError as error:
            await self._runner.cleanup()
            raise SettingsError(
                f"cannot serve HTTP on {host}:{port}: {error_text(error)}; "
                "choose another port, or 0 for any free one"
            ) from None
        return int(URL(address).port or 0)

    async def close(self) -> None:
        """Stop serving; running requests get one second to finish."""
        self._listener.close()
        await self._runner.cleanup()

    @web.middleware
    async def _refuse_other_names(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_loopback(self._host) and not names_loopback(request):
            return web.Response(status=403, text="Ask by http://127.0.0.1 or http://localhost.\n")
        return await handler(request)

    async def _serve_health(self, request: web.Request) -> web.Response:
        facts = dict(self._health())
        return web.json_response(facts, status=200 if facts.get("ok", True) else 503)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def names_loopback(request: web.Request) -> bool:
    """Return whether a request uses a loopback host name; foreign DNS names may resolve to loopback."""
    try:
        return is_loopback(URL(f"//{request.headers.get(hdrs.HOST, '')}").host or "")
    except ValueError:
        return False
