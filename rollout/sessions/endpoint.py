"""Serves model calls to the harnesses of this process, each under a URL with its session's key.

    GET  /s/KEY/v1/models
    POST /s/KEY/v1/chat/completions
    POST /s/KEY/v1/completions
    POST /s/KEY/v1/messages
    POST /s/KEY/v1/responses
    GET  /s/KEY/v1/responses/NAME (also DELETE)
    GET  /s/KEY/v1/results/NAME (also PUT)
    POST /s/KEY/inference/v1/generate

A key has 192 random bits and is refused after its session has ended. On loopback, the key alone authenticates
a client. Off loopback, URLs appear in the logs of clients and proxies, so requests must also send the
session's token as the API key.

`ApiServer` contains the parts that do not depend on session keys; `tether serve` (services/serving) uses it,
too.
"""

import asyncio
import functools
import hashlib
import hmac
import json
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from aiohttp import ClientConnectionResetError, hdrs, web
from aiohttp.typedefs import Handler
from yarl import URL

from protocol.errors import EpisodeError, SettingsError, error_text
from protocol.network.addresses import advertised_url, is_loopback
from protocol.network.certificates import server_tls
from protocol.network.http_listener import LimitedListener, request_logger
from rollout.config import EnvironmentConfig
from rollout.off_loop import LARGE, off_loop
from rollout.sessions.refusal import RequestRefused, ended, invalid
from rollout.sessions.requests import HarnessRequest, read_body
from rollout.sessions.served_call import APIS, Api, ServedCall
from rollout.sessions.session import Session

_log = request_logger("tether.sessions")

MAX_ENDED = 10_000
"""Number of ended sessions whose end reason is remembered for their clients; older ones become unknown."""
MAX_CONNECTIONS = 8192
"""Maximum open connections over all sessions."""
HEADER_S = 30.0
"""Timeout for the head of a connection's first request, seconds."""
BODY_S = 120.0
"""Timeout for a request body, seconds: 16 MiB at 150 kB/s."""
MODEL = "policy"
"""Listed model name; requests may use any name."""
LOOPBACK = EnvironmentConfig()
"""Settings of an endpoint on loopback."""


class ApiServer(ABC):
    """HTTP server of model APIs on its own port; subclasses map requests to sessions."""

    def __init__(
        self,
        config: EnvironmentConfig = LOOPBACK,
        *,
        model: str = MODEL,
        prefix: str = "",
        apis: Iterable[Api] = APIS,
        body_mb: int = 16,
        max_connections: int = MAX_CONNECTIONS,
        header_s: float = HEADER_S,
        body_s: float = BODY_S,
    ) -> None:
        """Create a server that is not started.

        Args:
            config: listen address, TLS and advertised URL.
            model: default model name of requests without one.
            prefix: path prefix of all routes.
            body_mb: maximum request body, MiB.
            max_connections, header_s: see `LimitedListener`.
            body_s: timeout for receiving a request body, seconds.
        """
        self._config, self._model = config, model
        self._max_bytes, self._body_s = body_mb * 2**20, body_s
        full = RequestRefused(503, "too_many_connections", f"{max_connections} connections are open")
        self._listener = LimitedListener(
            max_connections=max_connections, header_s=header_s, full=json.dumps(full.body).encode()
        )
        app = web.Application(client_max_size=self._max_bytes, middlewares=[self._listener.note, _as_errors])
        app.router.add_get(prefix + "/v1/models", self._serve_models)
        for api in apis:
            app.router.add_post(prefix + api.path, functools.partial(self._serve, api))
        self._router = app.router
        self._runner = web.AppRunner(
            app, access_log=None, logger=_log, handler_cancellation=True, shutdown_timeout=1.0
        )
        self.bound = ""
        """URL of the bound address."""
        self._address = ""

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            SettingsError: host or port cannot be bound, or the certificate is missing.
        """
        config = self._config
        tls = server_tls(config.cert_file, config.key_file) if config.cert_file else None
        await self._runner.setup()
        try:
            self.bound = await self._listener.start(
                self._runner, config.host, config.port, ports=config.ports if config.port else 1, tls=tls
            )
        except OSError as error:
            await self._runner.cleanup()
            raise SettingsError(
                f"setting environment.port: cannot serve on {config.host}:{config.port} "
                f"(environment.ports = {config.ports}): {error_text(error)}; choose others"
            ) from None
        url = URL(self.bound)
        self._address = advertised_url(
            config.advertise, scheme=url.scheme, host=config.host, port=int(url.port or 0)
        )

    async def close(self) -> None:
        """Stop serving."""
        self._listener.close()
        await self._runner.cleanup()

    @abstractmethod
    def session_of(self, request: web.Request) -> Session:
        """Return the session of a request.

        Raises:
            RequestRefused: the client has no session.
        """

    @abstractmethod
    def models(self, request: web.Request) -> list[dict[str, Any]]:
        """Return the available models in the OpenAI format. Raises: see `session_of`."""

    @abstractmethod
    def admit(self, session: Session, parsed: HarnessRequest) -> None:
        """Raise RequestRefused if the server cannot fulfil a request. May run in a thread."""

    async def _serve_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models(request)})

    async def _serve(self, api: Api, request: web.Request) -> web.StreamResponse:
        try:
            session = self.session_of(request)
            known = {"stored": session.stored} if api.keep is not None else {}

            def read(parsed: Any) -> HarnessRequest:
                parsed = api.read(parsed, rules=session.rules, **known)
                parsed = replace(parsed, model=parsed.model or self._model)
                self.admit(session, parsed)
                return parsed

            body = await self._body(request)
            pending = await session.read(body, read)
            call = ServedCall(api, request, session, pending, api.prefix + secrets.token_hex(8), len(body))
            return await (call.stream() if pending.request.stream else call.whole())
        except RequestRefused as refusal:
            return api.refused(refusal)

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._body_s):
                return await _read(request, self._max_bytes)
        except TimeoutError:
            raise RequestRefused(
                408, "body_too_slow", f"the body did not come within {self._body_s:g} s"
            ) from None


class SessionEndpoint(ApiServer):
    """HTTP server of a process's sessions."""

    def __init__(self, config: EnvironmentConfig = LOOPBACK, **limits: Any) -> None:
        """Create an endpoint that is not started; `limits` are keyword arguments of `ApiServer`."""
        super().__init__(config, prefix="/s/{key}", **limits)
        self._needs_token = bool(config.advertise) or not is_loopback(config.host)
        self._secret = secrets.token_bytes(32)
        """HMAC key from which session tokens are derived."""
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        self._router.add_get("/s/{key}/v1/responses/{name}", self._serve_stored)
        self._router.add_delete("/s/{key}/v1/responses/{name}", self._serve_stored)
        self._router.add_get("/s/{key}/v1/results/{name}", self._serve_result)
        self._router.add_put("/s/{key}/v1/results/{name}", self._serve_result)

    async def close(self) -> None:
        """End all sessions and stop serving."""
        for known in list(self._sessions):
            self._end(known, "the worker stops")
        await super().close()

    def open(self, session: Session) -> str:
        """Serve a session and return its key."""
        key = secrets.token_urlsafe(24)
        self._sessions[_known(key)] = session
        return key

    def url(self, key: str) -> str:
        """Return the base URL of a session for OpenAI clients."""
        return f"{self._address}/s/{key}/v1"

    def token(self, key: str) -> str:
        """Return the API key of a session's harness."""
        return hmac.digest(self._secret, key.encode(errors="surrogateescape"), "sha256").hex()

    def end(self, key: str, reason: str) -> None:
        """End a session: cancel its running calls and refuse its key. Idempotent."""
        self._end(_known(key), reason)

    def _end(self, key: bytes, reason: str) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        session.end(reason)
        self._ended[key] = session.ended
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def session_of(self, request: web.Request) -> Session:
        """Return the session of a request. Without the token, the existence of a session is not revealed."""
        key = request.match_info["key"]
        if self._needs_token and not has_api_key(request, self.token(key)):
            raise RequestRefused(401, "invalid_api_key", "the API key is not the key of the task")
        known = _known(key)
        if (session := self._sessions.get(known)) is not None:
            return session
        if (reason := self._ended.get(known)) is not None:
            raise ended(reason)
        raise RequestRefused(404, "session_not_found", "there is no session with this key")

    def models(self, request: web.Request) -> list[dict[str, Any]]:
        self.session_of(request)
        return [listed_model(self._model)]

    def admit(self, session: Session, parsed: HarnessRequest) -> None:
        """Admit every request: any model name is accepted."""

    async def _serve_stored(self, request: web.Request) -> web.Response:
        """Return or delete a stored response."""
        stored, name = self.session_of(request).stored, request.match_info["name"]
        if name not in stored:
            raise RequestRefused(404, "not_found", f"the session has no stored response {name[:80]!r}")
        if request.method == "DELETE":
            del stored[name]
            return web.json_response({"id": name, "object": "response", "deleted": True})
        body = stored[name].body
        return web.json_response(text=await off_loop(LARGE + 1, lambda: json.dumps(body)))

    async def _serve_result(self, request: web.Request) -> web.Response:
        """Return or record a tool's result. A recorded result is on disk before the client gets a reply."""
        results, name = self.session_of(request).results, request.match_info["name"]
        try:
            if request.method == "PUT":
                body = await self._body(request)
                value = await off_loop(len(body), functools.partial(read_body, body))
                result: bytes | None = await results.keep(name, value)
            else:
                result = await results.find(name)
        except EpisodeError as error:
            raise RequestRefused(500, "not_recorded", str(error)) from None
        if result is None:
            raise RequestRefused(404, "not_recorded", f"the session has no result {name[:80]!r}")
        return web.Response(body=result, content_type="application/json")


def has_api_key(request: web.Request, key: str) -> bool:
    """Return whether a request has the API key, as a bearer token or in `x-api-key`."""
    scheme, _, bearer = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    given = (bearer.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", ""))
    return any([hmac.compare_digest(each.encode(errors="replace"), key.encode()) for each in given])


def listed_model(name: str) -> dict[str, Any]:
    """Return a model entry in the OpenAI format."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "tether"}


def _known(key: str) -> bytes:
    """Return the hash of a key, for lookups whose timing reveals no other key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


@web.middleware
async def _as_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refusals in the OpenAI error format, with a retry hint."""
    try:
        return await handler(request)
    except RequestRefused as refusal:
        return web.json_response(refusal.body, status=refusal.status, headers={"x-should-retry": "false"})
    except ClientConnectionResetError:
        return web.Response()  # the client has disconnected, so the error cannot be sent
    except Exception as error:
        if not isinstance(error, web.HTTPException):
            _log.exception("session.error path=%s", request.path.partition("/v1")[2])
            error = web.HTTPInternalServerError()
        code = "not_found" if error.status == 404 else "refused"
        body = RequestRefused(error.status, code, error.reason).body
        return web.json_response(body, status=error.status, headers={"x-should-retry": "false"})


async def _read(request: web.Request, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        RequestRefused: the body is too large or malformed.
    """
    try:
        if (request.content_length or 0) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestRefused(413, "body_too_large", f"the body is over {limit} bytes") from None
    except web.RequestPayloadError as error:
        raise invalid(f"the body cannot be read: {str(error)[:200]}", code="invalid_body") from None
